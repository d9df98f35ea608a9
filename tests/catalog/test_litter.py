"""What lies at a destination besides checkpoints, and when it goes: resume pins, and what killed probes have left."""

from collections.abc import AsyncIterator

from tests.fakes.fake_store import FakeStore
from tests.restore.stored_checkpoints import store_checkpoint

from keepstep_agent.catalog.markers import list_committed
from keepstep_agent.catalog.pruning import prune, remove_litter
from keepstep_agent.core.policies.restore_choice import Pin, encode_pin
from keepstep_agent.core.settings.values import RetentionSettings
from keepstep_agent.core.stored.object_layout import pin_key, place_key
from keepstep_agent.ports import ObjectInfo

DAY = 24 * 3600.0


async def pinned(store: FakeStore, attempt: str) -> str:
    key = pin_key(attempt, 0)
    await store.put(key, encode_pin(Pin(attempt=attempt)))
    return key


async def pins_left(store: FakeStore) -> list[str]:
    return [one.key async for one in store.list(".keepstep/resume/")]


async def test_the_pins_of_attempts_that_are_long_over_go(store: FakeStore) -> None:
    await store_checkpoint(store, 1)
    first = await pinned(store, "first")
    store.now += 10 * DAY
    second = await pinned(store, "second")
    store.now += DAY / 2
    # The second attempt began half a day ago: whoever is late in the first may still look for its pin.
    assert (await prune(store, RetentionSettings(), now=store.now)).litter == ()
    store.now += DAY
    third = await pinned(store, "third")
    report = await prune(store, RetentionSettings(), now=store.now, dry_run=True)
    assert report.litter == (first,)
    assert len(await pins_left(store)) == 3
    await prune(store, RetentionSettings(), now=store.now)
    assert await pins_left(store) == [second, third]


async def test_the_pin_of_the_newest_attempt_stays_however_long_it_lives(store: FakeStore) -> None:
    await store_checkpoint(store, 1)
    alive = await pinned(store, "alive")
    store.now += 400 * DAY
    await prune(store, RetentionSettings(), now=store.now)
    assert await pins_left(store) == [alive]


class _LosesAPin(FakeStore):
    """The pin is listed, and then gone."""

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        async for one in super().list(prefix):
            yield one
        self.objects.pop(pin_key("gone", 0), None)


async def test_a_pin_that_is_removed_while_prune_looks_stops_nothing() -> None:
    store = _LosesAPin()
    for step in (1, 2):
        await store_checkpoint(store, step)
    await pinned(store, "gone")
    await prune(store, RetentionSettings(keep_last=1), now=store.now)
    assert [one.step for one in await list_committed(store)] == [2]
    await store.close()


async def test_what_killed_probes_left_goes_and_a_live_one_keeps_its_own(store: FakeStore) -> None:
    await store_checkpoint(store, 1)
    await store.put(".keepstep/probe/0123456789abcdef", b"")
    await store.create_upload(".keepstep/probe/0123456789abcdef")
    store.now += 2 * DAY
    await store.put(".keepstep/probe/fedcba9876543210", b"")
    live = await store.create_upload(".keepstep/probe/fedcba9876543210")
    await prune(store, RetentionSettings(), now=store.now)
    assert [one.key async for one in store.list(".keepstep/probe/")] == [".keepstep/probe/fedcba9876543210"]
    assert list(store.uploads) == [live]


async def test_litter_goes_and_saves_stay_where_only_litter_is_to_go(store: FakeStore) -> None:
    await store_checkpoint(store, 1)
    await store_checkpoint(store, 2, committed=False)
    unfinished = await store.create_upload("checkpoint-3/0123abcd-c000003/model.pt")
    await pinned(store, "first")
    await store.put(".keepstep/probe/0123456789abcdef", b"")
    await store.create_upload(".keepstep/probe/0123456789abcdef")
    store.now += 2 * DAY
    second = await pinned(store, "second")
    store.now += 2 * DAY
    kept = {key for key in store.objects if not key.startswith(".keepstep/probe/")} - {pin_key("first", 0)}
    store.calls.clear()
    assert await remove_litter(store, RetentionSettings(), now=store.now) == 3
    assert set(store.objects) == kept
    assert second in kept
    assert list(store.uploads) == [unfinished]
    assert "" not in [key for method, key in store.calls if method == "list"]


async def test_the_pins_and_places_of_starts_that_are_over_go_together(store: FakeStore) -> None:
    await store_checkpoint(store, 1)
    for generation in range(2):
        await store.put(pin_key("job", generation), encode_pin(Pin(attempt="job")))
        store.now += DAY / 2
        # It is taken when the checkpoint is on the pod's disk.
        await store.put(place_key("job", generation, "node-0"), b"")
        store.now += 10 * DAY
    await prune(store, RetentionSettings(), now=store.now)
    # The newest start may be alive, and one of its pods may start again.
    assert await pins_left(store) == [pin_key("job", 1), place_key("job", 1, "node-0")]

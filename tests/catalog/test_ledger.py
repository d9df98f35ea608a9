"""A ledger at a destination: read whole, found below a prefix, merged, and ignored by everything else."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from structlog.testing import capture_logs
from tests.core.noted_lives import killed_and_resumed
from tests.fakes.fake_store import FakeStore
from tests.restore.stored_checkpoints import store_checkpoint

from keepstep_agent.catalog.ledger import merge_ledger, read_ledger
from keepstep_agent.catalog.listing import list_all
from keepstep_agent.catalog.markers import list_committed
from keepstep_agent.catalog.pruning import prune
from keepstep_agent.core.errors import ErrorKind, StoreError
from keepstep_agent.core.limits import LEDGER_OBJECTS, LEDGER_OBJECTS_BYTES
from keepstep_agent.core.settings.values import RetentionSettings
from keepstep_agent.core.stored.ledger import AgentLife, encode_life
from keepstep_agent.core.stored.object_layout import LEDGER_PREFIX, ledger_key
from keepstep_agent.ports import StoreWriter

LIVES = tuple(life.life for life in killed_and_resumed())
HOUR = 3600.0
DAY = 24 * HOUR


async def note(store: StoreWriter, lives: Sequence[AgentLife] = LIVES, *, run: str = "") -> list[str]:
    """Store them as their agents do, one object for each entry."""
    keys = []
    for life in lives:
        for entry in life.entries:
            keys.append(run + ledger_key(life.attempt, entry.at, f"{life.agent}.{entry.number}"))
            await store.put(keys[-1], encode_life(replace(life, entries=(entry,))))
    return keys


def many() -> list[AgentLife]:
    """More entries than a merge asks for."""
    return [replace(life, agent=f"{life.agent}-{number}") for number in range(3) for life in LIVES]


async def merge(store: FakeStore, hours: float, *, dry_run: bool = False) -> int:
    """Merge so many hours later."""
    listed = [one async for one in store.list(LEDGER_PREFIX)]
    return await merge_ledger(store, listed, now=store.now + hours * HOUR, dry_run=dry_run)


async def keys_of(store: FakeStore) -> list[str]:
    return [one.key async for one in store.list(LEDGER_PREFIX)]


def by_agent(lives: Sequence[AgentLife]) -> list[AgentLife]:
    return sorted(lives, key=lambda life: life.agent)


async def test_a_ledger_is_read_whole_and_what_is_damaged_is_counted() -> None:
    store = FakeStore()
    keys = await note(store)
    await store.put(keys[0], b"garbage")
    await store.put(ledger_key("job", 1.0, "other"), b"{}")
    found = await read_ledger(store)
    assert (found.unreadable, found.left_out) == (2, 0)
    lost = replace(LIVES[0], entries=LIVES[0].entries[1:])
    assert by_agent(found.lives) == by_agent([lost, LIVES[1]])


@pytest.mark.parametrize(("objects", "most_bytes"), [(3, LEDGER_OBJECTS_BYTES), (LEDGER_OBJECTS, 900)])
async def test_of_too_large_a_ledger_the_newest_objects_are_read(
    monkeypatch: pytest.MonkeyPatch, objects: int, most_bytes: int
) -> None:
    store = FakeStore()
    keys = await note(store)
    monkeypatch.setattr("keepstep_agent.catalog.ledger.LEDGER_OBJECTS", objects)
    found = await read_ledger(store, most_bytes=most_bytes)
    entries = [entry for life in found.lives for entry in life.entries]
    assert 0 < len(entries) == len(keys) - found.left_out < len(keys)
    assert entries == list(LIVES[1].entries[-len(entries) :])


async def test_a_store_that_is_away_is_no_damage() -> None:
    store = FakeStore()
    await note(store)
    store.fail("get", ErrorKind.UNREACHABLE)
    with pytest.raises(StoreError, match="get fails"):
        await read_ledger(store)


class _RefusingStore(FakeStore):
    """A store that refuses to give one object, such as one that was archived, or one of another key."""

    refused: tuple[str, ErrorKind] = ("", ErrorKind.ACCESS_DENIED)

    async def get(self, key: str, *, limit_bytes: int, fresh: bool = False) -> bytes:
        if key == self.refused[0]:
            raise StoreError(self.refused[1], f"{key} is refused")
        return await super().get(key, limit_bytes=limit_bytes, fresh=fresh)


@pytest.mark.parametrize("kind", [ErrorKind.ACCESS_DENIED, ErrorKind.REQUEST_REFUSED])
async def test_an_object_that_the_store_refuses_is_counted_and_neither_merged_nor_deleted(kind: ErrorKind) -> None:
    store = _RefusingStore()
    keys = await note(store, many())
    store.refused = (keys[3], kind)
    found = await read_ledger(store)
    assert (found.unreadable, found.refusal and found.refusal.kind) == (1, kind)
    assert sum(len(life.entries) for life in found.lives) == len(keys) - 1
    assert await merge(store, 2) == len(keys) - 2
    assert keys[3] in await keys_of(store)
    assert by_agent((await read_ledger(store)).lives) == by_agent(found.lives)


async def test_the_ledger_of_a_run_below_the_destination_is_read_and_one_that_is_missing_is_empty() -> None:
    store = FakeStore()
    await note(store, run="b/two/")
    assert by_agent((await read_ledger(store, "b/two/")).lives) == by_agent(LIVES)
    assert (await read_ledger(store)).empty


async def test_a_merge_leaves_few_objects_that_say_the_same() -> None:
    store = FakeStore()
    await note(store, many())
    assert await merge(store, 0.5) == 0
    before = await keys_of(store)
    assert await merge(store, 2, dry_run=True) == len(before) - 1
    assert await keys_of(store) == before
    assert await merge(store, 2) == len(before) - 1
    assert len(await keys_of(store)) == 1
    assert by_agent((await read_ledger(store)).lives) == by_agent(many())
    assert await merge(store, 9) == 0


@pytest.mark.parametrize("method", ["put", "delete", "get"])
@pytest.mark.parametrize("after_acting", [False, True])
async def test_a_merge_that_fails_anywhere_loses_nothing(method: str, after_acting: bool) -> None:
    store = FakeStore()
    await note(store, many())
    store.fail(method, ErrorKind.UNREACHABLE, after_acting=after_acting)
    with pytest.raises(StoreError):
        await merge(store, 2)
    assert by_agent((await read_ledger(store)).lives) == by_agent(many())
    await merge(store, 4)
    assert by_agent((await read_ledger(store)).lives) == by_agent(many())


class _LockedStore(FakeStore):
    """A store whose own retention protects everything."""

    locked = True

    async def delete(self, key: str) -> None:
        if self.locked:
            raise StoreError(ErrorKind.OBJECT_LOCKED, f"{key} is protected")
        await super().delete(key)


async def test_after_a_killed_merge_the_next_one_deletes_and_writes_nothing() -> None:
    store = FakeStore()
    await note(store, many())
    before = await keys_of(store)
    store.fail("delete", ErrorKind.UNREACHABLE)
    with pytest.raises(StoreError):
        await merge(store, 2)
    left, (merged_key,) = set(before) & set(await keys_of(store)), set(await keys_of(store)) - set(before)
    assert len(left) == await merge(store, 3, dry_run=True) == await merge(store, 3) == 1
    assert await keys_of(store) == [merged_key]
    assert by_agent((await read_ledger(store)).lives) == by_agent(many())


async def _merged_objects_after(store: FakeStore, merges: int) -> int:
    """Merge so often, a minute apart, which makes the ledger no smaller; return how many merged objects there are."""
    for _ in range(merges):
        store.now += 60
        assert await merge(store, 2) == 0
    return sum("-merged-" in key for key in await keys_of(store))


async def test_in_a_store_that_deletes_nothing_no_entry_is_merged_twice() -> None:
    store = _LockedStore()
    await note(store, many())
    assert await _merged_objects_after(store, 3) == 1
    later = [
        replace(life, agent=f"{life.agent}-later", entries=tuple(replace(one, at=one.at + DAY) for one in life.entries))
        for life in many()
    ]
    await note(store, later)
    assert await _merged_objects_after(store, 3) == 2
    assert by_agent((await read_ledger(store)).lives) == by_agent([*many(), *later])
    store.locked = False
    await merge(store, 2)
    assert len(await keys_of(store)) == 1
    assert by_agent((await read_ledger(store)).lives) == by_agent([*many(), *later])


async def test_in_a_store_that_deletes_nothing_what_arrives_late_costs_one_more_merge() -> None:
    store = _LockedStore()
    await note(store, many())
    assert await _merged_objects_after(store, 2) == 1
    late = replace(LIVES[0], agent="late", entries=LIVES[0].entries[:1])
    await note(store, [late])
    assert await _merged_objects_after(store, 3) == 2


async def test_damaged_objects_are_neither_merged_nor_deleted() -> None:
    store = FakeStore()
    keys = await note(store, many())
    await store.put(keys[3], b"garbage")
    await merge(store, 2)
    assert keys[3] in await keys_of(store)
    assert (await read_ledger(store)).unreadable == 1


class _MergingStore(FakeStore):
    """A store whose ledger is merged just before the first object is read."""

    merged = False

    async def get(self, key: str, *, limit_bytes: int, fresh: bool = False) -> bytes:
        if not self.merged:
            self.merged = True
            assert await merge(self, 2)
        return await super().get(key, limit_bytes=limit_bytes, fresh=fresh)


async def test_a_reader_misses_nothing_when_objects_are_merged_before_it_reads_them() -> None:
    store = _MergingStore()
    await note(store, many())
    assert by_agent((await read_ledger(store)).lives) == by_agent(many())


async def test_other_readers_ignore_the_ledger() -> None:
    store = FakeStore()
    for step in (100, 200):
        await store_checkpoint(store, step)
    listed, committed = await list_all(store), await list_committed(store)
    await note(store)
    with_ledger = await list_all(store)
    assert len(with_ledger.ledger) == sum(len(life.entries) for life in LIVES)
    assert (replace(with_ledger, ledger=[]), await list_committed(store)) == (listed, committed)


async def test_a_prune_keeps_what_the_ledger_says_of_deleted_checkpoints() -> None:
    store = FakeStore()
    for step in (100, 200, 300):
        await store_checkpoint(store, step)
    await note(store, many())
    store.now += 30 * DAY
    report = await prune(store, RetentionSettings(keep_last=1), now=store.now)
    assert len(report.plan.deletions) == 2
    assert report.ledger_objects == len([entry for life in many() for entry in life.entries]) - 1
    assert by_agent((await read_ledger(store)).lives) == by_agent(many())


async def test_a_merge_that_fails_costs_a_prune_nothing_else() -> None:
    store = FakeStore()
    for step in (100, 200, 300):
        await store_checkpoint(store, step)
    await note(store, many())
    store.now += 30 * DAY
    store.fail("put", ErrorKind.UNREACHABLE)
    with capture_logs() as logs:
        report = await prune(store, RetentionSettings(keep_last=1), now=store.now)
    assert (len(report.plan.deletions), report.ledger_objects) == (2, 0)
    assert [line["event"] for line in logs] == ["ledger.not_merged"]


@pytest.mark.parametrize("seed", range(10))
async def test_whatever_is_flipped_in_an_object_reading_ends_with_what_is_intact(seed: int) -> None:
    store, chance = FakeStore(), random.Random(seed)
    keys = await note(store)
    key = chance.choice(keys)
    body = bytearray(await store.get(key, limit_bytes=10_000))
    for _ in range(chance.randrange(1, 9)):
        body[chance.randrange(len(body))] ^= 1 << chance.randrange(8)
    await store.put(key, bytes(body))
    found = await read_ledger(store)
    assert sum(len(life.entries) for life in found.lives) + found.unreadable == len(keys)

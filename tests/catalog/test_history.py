"""Destinations with a long history: what is read is what was asked for, not everything that there ever was."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import pytest
from tests.core.listings import why_kept
from tests.fakes.fake_store import FakeStore
from tests.restore.one_output import restore
from tests.restore.stored_checkpoints import store_checkpoint

from keepstep_agent.catalog.damage import note_damage
from keepstep_agent.catalog.deep_check import check
from keepstep_agent.catalog.markers import list_committed, list_down_to, list_step
from keepstep_agent.catalog.pruning import PruneReport, prune
from keepstep_agent.catalog.recent_pruning import prune_recent
from keepstep_agent.core.model import Kind, SaveInfo
from keepstep_agent.core.policies.retention import horizon as horizon_rules
from keepstep_agent.core.policies.retention.horizon import Horizon, horizon_of
from keepstep_agent.core.settings.values import RetentionSettings
from keepstep_agent.core.stored.object_layout import is_manifest, marker_key, save_prefix
from keepstep_agent.ports import ObjectInfo
from keepstep_agent.restore.init_step import Restored


class ListingStore(FakeStore):
    """Counts what its listings have shown. `backwards`: it lists in an order of its own."""

    def __init__(self, *, backwards: bool = False) -> None:
        super().__init__()
        self.listed = 0
        self._backwards = backwards

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        found = [one async for one in super().list(prefix)]
        for one in reversed(found) if self._backwards else found:
            self.listed += 1
            yield one


async def store_markers(store: FakeStore, steps: Iterable[int]) -> None:
    """Store what a listing shows of checkpoints. Their markers are damaged."""
    for step in steps:
        info = SaveInfo(save=f"0123abcd-{step:06d}", name="n", step=step, kind=Kind.PERIODIC, world_size=1)
        await store.put(marker_key(info), b"")


async def run(store: FakeStore, volume: Path) -> Restored | None:
    agent = volume / ".keepstep" / "agent"
    return await restore(store, checkpoint_directory=volume / "checkpoints", volume=volume, state_directory=agent)


async def test_the_saves_of_one_step_are_listed_alone() -> None:
    store = ListingStore()
    await store_markers(store, range(1, 2_001))
    await store_checkpoint(store, 7, save="aaaaaaaa-000001")
    assert [one.save for one in await list_step(store, 7)] == ["aaaaaaaa-000001", "0123abcd-000007"]
    assert store.listed == 2


async def test_a_store_that_lists_in_another_order_is_listed_whole() -> None:
    store = ListingStore(backwards=True)
    await store_markers(store, range(1, 2_001))
    assert [one.step for one in await list_committed(store)] == list(range(2_000, 0, -1))


async def test_restore_goes_back_to_the_oldest_when_all_newer_ones_are_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # After each checkpoint that it skips. That frees memory, and takes a second where a test's process has much.
    monkeypatch.setattr("gc.collect", lambda: 0)
    store = ListingStore()
    await store_checkpoint(store, 1)
    await store_markers(store, range(2, 46))
    restored = await run(store, tmp_path)
    assert restored is not None
    assert restored.step == 1
    assert len(restored.skipped) == 44


async def test_a_restore_of_the_newest_lists_the_markers_and_its_own_objects(tmp_path: Path) -> None:
    store = ListingStore()
    await store_markers(store, range(1, 5_001))
    await store_checkpoint(store, 6_000)
    own = sum(not key.startswith(".keepstep/") for key in store.objects)
    restored = await run(store, tmp_path)
    assert restored is not None
    assert restored.step == 6_000
    assert store.listed == 5_001 + own


_KEEP = RetentionSettings(keep_last=2, keep_every_steps=10)
_DAY = 24 * 3600.0


async def horizon_above(store: FakeStore, newest: int, monkeypatch: pytest.MonkeyPatch) -> Horizon:
    """The horizon that a whole prune returns if so many checkpoints are recent."""
    monkeypatch.setattr(horizon_rules, "_RECENT", newest)
    return horizon_of(await list_down_to(store, 0), _KEEP)


async def pruned(store: FakeStore, horizon: Horizon, known: Iterable[str] = ()) -> PruneReport | None:
    return await prune_recent(store, _KEEP, horizon, series={""}, now=store.now, known=set(known))


async def steps_left(store: FakeStore) -> list[int]:
    return [one.step for one in await list_committed(store)]


async def test_retention_after_a_commit_lists_the_newest_markers_and_what_it_deletes() -> None:
    store = ListingStore()
    await store_markers(store, range(10, 100_001, 10))
    await store_checkpoint(store, 5, committed=False)
    horizon = (await prune(store, _KEEP, now=store.now, dry_run=True)).horizon
    gone = await store_checkpoint(store, 100_001)
    own = sum(key.startswith(save_prefix(gone)) for key in store.objects)
    newest = [await store_checkpoint(store, step) for step in (100_002, 100_003)]
    listed_by_checks = sum(key.startswith(save_prefix(info)) for info in newest for key in store.objects)
    store.listed = 0
    store.calls.clear()
    report = await pruned(store, horizon, [newest[-1].save])
    assert report is not None
    assert [one.save for one in report.plan.deletions] == [gone.save]
    assert not [key for key in store.objects if gone.save in key]
    # Twice the markers above the horizon and the first one below it.
    assert store.listed == 2 * (500 + 3 + 1) + listed_by_checks + own
    # The markers and manifests of those that stay, and the marker of what goes.
    assert len([key for method, key in store.calls if method == "get"]) == 5
    assert "" not in [key for method, key in store.calls if method == "list"]


async def test_retention_that_deletes_nothing_lists_the_newest_markers_alone() -> None:
    store = ListingStore()
    await store_markers(store, range(10, 100_001, 10))
    horizon = horizon_of(await list_down_to(store, 0), _KEEP)
    store.listed = 0
    store.calls.clear()
    assert await pruned(store, horizon) is not None
    assert store.listed == 501
    assert {method for method, _ in store.calls} == {"list"}


async def test_a_whole_prune_lists_each_object_once_and_each_marker_twice() -> None:
    listed: list[int] = []
    for count in (200, 400):
        store = ListingStore()
        for step in range(count):
            await store_checkpoint(store, step, ranks=[{"model.pt": b"model"}])
        await prune(store, RetentionSettings(keep_last=1), now=store.now, dry_run=True)
        listed.append(store.listed)
        # A file, a manifest and a marker each; to check the newest, its two objects are listed again.
        assert listed[-1] == count * (3 + 1) + 2


async def test_what_lies_below_the_horizon_or_never_committed_waits_for_a_whole_prune(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = ListingStore()
    for step in range(1, 9):
        await store_checkpoint(store, step)
    await store_checkpoint(store, 7, save="89abcdef-000001", committed=False)
    horizon = await horizon_above(store, 5, monkeypatch)
    store.now += 2 * _DAY
    await store_checkpoint(store, 9)
    assert await pruned(store, horizon) is not None
    assert await steps_left(store) == [9, 8, 3, 2, 1]
    assert [key for key in store.objects if "89abcdef-000001" in key]
    await prune(store, _KEEP, now=store.now)
    assert await steps_left(store) == [9, 8]
    assert not [key for key in store.objects if "89abcdef-000001" in key]


async def test_a_run_that_fell_back_below_the_horizon_needs_a_whole_prune(monkeypatch: pytest.MonkeyPatch) -> None:
    store = ListingStore()
    for step in range(101, 109):
        await store_checkpoint(store, step)
    horizon = await horizon_above(store, 4, monkeypatch)
    store.now += 60
    again = await store_checkpoint(store, 51)
    assert await pruned(store, horizon, [again.save]) is None
    await prune(store, _KEEP, now=store.now, known=[again.save])
    assert await steps_left(store) == [108, 107, 106, 105, 104, 103, 102, 101, 51]


async def test_what_was_committed_before_one_below_the_horizon_justifies_no_deletion(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = ListingStore()
    for step in range(101, 109):
        await store_checkpoint(store, step)
    store.now += 60
    await store_checkpoint(store, 51)
    store.now += 60
    horizon = await horizon_above(store, 4, monkeypatch)
    await store_checkpoint(store, 109)
    assert await pruned(store, horizon) is not None
    assert await steps_left(store) == [109, 108, 107, 106, 105, 104, 103, 102, 101, 51]
    await store_checkpoint(store, 111)
    assert await pruned(store, horizon) is not None
    # 105 is the oldest above the horizon, and may be the milestone of 100.
    assert await steps_left(store) == [111, 109, 105, 104, 103, 102, 101, 51]
    await prune(store, _KEEP, now=store.now)
    assert await steps_left(store) == [111, 109, 101, 51]


async def test_a_commit_of_another_output_directory_below_the_horizon_holds_up_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = ListingStore()
    for step in range(101, 109):
        await store_checkpoint(store, step)
    store.now += 60
    await store_checkpoint(store, 51, directory="stage-two")
    horizon = await horizon_above(store, 4, monkeypatch)
    await store_checkpoint(store, 109)
    assert await pruned(store, horizon) is not None
    assert await steps_left(store) == [109, 108, 105, 104, 103, 102, 101, 51]


@pytest.mark.parametrize("damage", ["truncated", "noted"])
async def test_a_damaged_newest_justifies_nothing_after_a_commit_either(
    damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ListingStore()
    for step in range(1, 5):
        info = await store_checkpoint(store, step)
    if damage == "noted":
        await note_damage(store, info.save, "restore found it so")
    else:
        await store.put(f"{save_prefix(info)}model-0.safetensors", b"short")
    assert await pruned(store, Horizon()) is not None
    assert await steps_left(store) == [4, 3, 2]


async def test_a_checkpoint_whose_marker_cannot_be_read_waits_for_a_whole_prune() -> None:
    store = ListingStore()
    await store_markers(store, [1])
    for step in (2, 3):
        await store_checkpoint(store, step)
    report = await pruned(store, Horizon())
    assert report is not None
    assert "where its objects are" in why_kept(report.plan)["0123abcd-000001"]
    await prune(store, _KEEP, now=store.now)
    assert await steps_left(store) == [3, 2]


class _Shrinks(ListingStore):
    """Loses a marker after the first listing of markers."""

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        async for one in super().list(prefix):
            yield one
        if prefix == ".keepstep/commits/":
            self.objects.pop(marker_key(self.lost), None)

    lost: SaveInfo


async def test_a_listing_that_shrinks_meanwhile_refuses_after_a_commit_too() -> None:
    store = _Shrinks()
    infos = [await store_checkpoint(store, step) for step in (1, 2, 3, 4)]
    store.lost = infos[2]
    report = await pruned(store, Horizon())
    assert report is not None
    assert infos[2].save in report.plan.refused
    assert await steps_left(store) == [4, 2, 1]


class _BusyStore(FakeStore):
    """Counts the reads that are under way together."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = self.most_reads = 0

    async def get(self, key: str, *, limit_bytes: int, fresh: bool = False) -> bytes:
        self.reads += 1
        self.most_reads = max(self.most_reads, self.reads)
        for _ in range(3):
            await asyncio.sleep(0)
        self.reads -= 1
        return await super().get(key, limit_bytes=limit_bytes, fresh=fresh)


async def test_a_thousand_manifests_are_read_once_each_and_eight_at_a_time() -> None:
    store = _BusyStore()
    for step in (1, 2):
        await store_checkpoint(store, step, ranks=[{f"model-{rank}.pt": b""} for rank in range(1_000)])
    newest, _ = await list_committed(store)
    for read in (lambda: check(store, newest), lambda: prune(store, RetentionSettings(keep_last=1), now=store.now)):
        store.calls.clear()
        await read()
        manifests = [key for method, key in store.calls if method == "get" and is_manifest(key)]
        assert len(manifests) == len(set(manifests)) == 1_000
        assert store.most_reads == 8

"""Pruning snapshots: what a remaining one names stays, and what nobody needs goes."""

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from tests.catalog.stored_snapshots import commit, output, snapshot_id, snapshot_info, store_snapshot
from tests.core.listings import why_kept
from tests.fakes.fake_store import FakeStore
from tests.restore.stored_checkpoints import flip_byte, store_checkpoint, truncate

from mooring_agent.catalog.damage import note_damage
from mooring_agent.catalog.deep_check import check
from mooring_agent.catalog.markers import list_committed, list_snapshots
from mooring_agent.catalog.pruning import PruneReport, prune
from mooring_agent.catalog.recent_pruning import prune_recent
from mooring_agent.core.errors import ErrorKind, StoreError
from mooring_agent.core.model import RankManifest
from mooring_agent.core.policies.retention.horizon import Horizon
from mooring_agent.core.settings.values import RetentionSettings
from mooring_agent.core.stored.object_layout import (
    PRUNED_PREFIX,
    base_key,
    file_key,
    manifest_key,
    marker_key,
    pack_key,
    tombstone_key,
)
from mooring_agent.core.stored.reservation import encode_reservation
from mooring_agent.ports import ObjectInfo

DAY = 24 * 3600.0


async def chain(store: FakeStore, count: int = 4, *, series: str = "node-0") -> list[RankManifest]:
    """`a` never changes, `b` at every second snapshot, `c` at each. A minute lies between them."""
    manifests: list[RankManifest] = []
    for number in range(1, count + 1):
        files = output(a=1, b=number // 2, c=number)
        base = manifests[-1] if manifests else None
        manifests.append(await store_snapshot(store, number, files, base=base, series=series))
        store.now += 60
    return manifests


async def pruned(store: FakeStore, keep_last: int = 1, **options: object) -> PruneReport:
    return await prune(store, RetentionSettings(keep_last=keep_last), now=store.now, **options)  # type: ignore[arg-type]


async def pruned_recent(store: FakeStore, keep_last: int = 1, *, series: str = "node-0") -> PruneReport:
    report = await prune_recent(
        store, RetentionSettings(keep_last=keep_last), Horizon(), series={series}, now=store.now
    )
    assert report is not None
    return report


async def left(store: FakeStore, series: str = "node-0") -> list[int]:
    """The numbers of the snapshots that are left, each of which is whole."""
    await all_are_whole(store)
    return [one.step for one in (await list_snapshots(store)).get(series, ())]


async def all_are_whole(store: FakeStore) -> None:
    for snapshots in (await list_snapshots(store)).values():
        for one in snapshots:
            assert await check(store, one) == ()


def objects_of(store: FakeStore, manifest: RankManifest) -> set[str]:
    """What is left in the folder of a snapshot."""
    prefix = f"{manifest.info.name}/{manifest.info.save}/"
    return {key.removeprefix(prefix) for key in store.objects if key.startswith(prefix)}


def tombstones(store: FakeStore) -> list[str]:
    return [key for key in store.objects if key.startswith(PRUNED_PREFIX)]


async def test_what_a_remaining_snapshot_names_stays_and_everything_else_goes(store: FakeStore) -> None:
    first, second, third, fourth = await chain(store)
    before = dict(store.objects)
    report = await pruned(store, keep_last=2)
    assert await left(store) == [4, 3]
    # With what stays, the manifest stays that shows whose it is.
    assert objects_of(store, first) == {"out/a.pt", ".mooring/manifest-00000-00001.json"}
    assert objects_of(store, second) == {"out/b.pt", ".mooring/manifest-00000-00001.json"}
    assert objects_of(store, third) == {"out/c.pt", ".mooring/manifest-00000-00001.json", ".mooring/base.json"}
    assert objects_of(store, fourth) == {
        "out/b.pt",
        "out/c.pt",
        ".mooring/manifest-00000-00001.json",
        ".mooring/base.json",
    }
    assert tombstones(store) == []
    assert {one.save for one in report.plan.deletions} == {first.info.save, second.info.save}
    gone = {key: one for key, one in before.items() if key not in store.objects and not key.startswith(".")}
    assert report.freed_bytes == sum(len(one.body) for one in gone.values()) > 0


async def test_what_is_left_of_a_pruned_snapshot_goes_once_nobody_names_it(store: FakeStore) -> None:
    first, second, *_ = await chain(store)
    await pruned(store)
    assert await left(store) == [4]
    store.now += 2 * DAY
    fifth = await store_snapshot(store, 5, output(a=2, b=2, c=5))
    store.now += 60
    report = await pruned(store)
    assert await left(store) == [5]
    assert (objects_of(store, first), objects_of(store, second)) == (set(), set())
    assert report.freed_bytes > 0
    assert {key.split("/")[1] for key in store.objects if not key.startswith(".")} == {fifth.info.save}


async def test_of_what_is_left_a_prune_takes_each_object_when_it_is_free(store: FakeStore) -> None:
    first = await store_snapshot(store, 1, output(a=1, b=1))
    second = await store_snapshot(store, 2, output(a=1, b=1, c=1), base=first)
    store.now += 60
    await pruned(store)
    assert {"out/a.pt", "out/b.pt"} < objects_of(store, first)
    store.now += 2 * DAY
    await store_snapshot(store, 3, output(a=1, b=2, c=1), base=second)
    await pruned(store)
    assert await left(store) == [3]
    assert objects_of(store, first) == {"out/a.pt", ".mooring/manifest-00000-00001.json"}
    report = await pruned(store)
    assert why_kept(report.plan)[first.info.save] == "other snapshots share what is left of it"


async def test_a_pack_stays_as_long_as_one_of_its_files_is_named(store: FakeStore) -> None:
    small = {f"out/small-{number}": bytes([number]) * 100 for number in range(5)}
    first = await store_snapshot(store, 1, output(a=1) | small, packed=small)
    last = dict(list(small.items())[:1])
    await store_snapshot(store, 2, output(a=2) | last, base=first)
    await pruned(store)
    assert await left(store) == [2]
    assert pack_key(first.info, 0, 0) in store.objects
    assert file_key(first.info, "out/a.pt") not in store.objects


async def test_each_series_is_kept_for_itself_and_so_are_announced_checkpoints(store: FakeStore) -> None:
    for step in (100, 200, 300):
        await store_checkpoint(store, step)
    await chain(store, 3)
    await chain(store, 2, series="node-1")
    await chain(store, 1, series="node-2")
    await pruned(store)
    assert [await left(store, series) for series in ("node-0", "node-1", "node-2")] == [[3], [2], [1]]
    assert [one.step for one in await list_committed(store)] == [300]


async def test_multiples_of_a_step_are_no_reason_to_keep_a_snapshot(store: FakeStore) -> None:
    await chain(store)
    await prune(store, RetentionSettings(keep_last=1, keep_every_steps=1), now=store.now)
    assert await left(store) == [4]


async def test_all_snapshots_stay_where_all_checkpoints_do(store: FakeStore) -> None:
    await chain(store)
    store.calls.clear()
    await pruned(store, keep_last=0)
    assert await left(store) == [4, 3, 2, 1]


@pytest.mark.parametrize("what", ["truncated", "noted"])
async def test_a_damaged_newest_justifies_no_deletion(store: FakeStore, what: str) -> None:
    *_, newest = await chain(store, 3)
    if what == "truncated":
        await truncate(store, file_key(newest.info, "out/c.pt"))
    else:
        await flip_byte(store, file_key(newest.info, "out/c.pt"), 5)
        await note_damage(store, newest.info.save, "restore found it so")
    await pruned(store)
    assert [one.step for one in (await list_snapshots(store))["node-0"]] == [3, 2]


async def test_what_a_volume_resumed_from_stays_and_so_does_all_that_it_names(store: FakeStore) -> None:
    manifests = await chain(store)
    await pruned(store, resumed_from=manifests[1].info.save)
    assert await left(store) == [4, 2]


async def test_a_listing_without_a_known_snapshot_refuses_everything(store: FakeStore) -> None:
    await chain(store)
    report = await pruned(store, known=["0123abcd-000099"])
    assert "0123abcd-000099" in report.plan.refused
    assert await left(store) == [4, 3, 2, 1]


async def test_a_dry_run_changes_nothing_and_says_the_same(store: FakeStore) -> None:
    await chain(store)
    before = dict(store.objects)
    shown = await pruned(store, dry_run=True)
    assert store.objects == before
    done = await pruned(store)
    assert (done.plan, done.freed_bytes) == (shown.plan, shown.freed_bytes)


async def test_tombstones_come_first_then_a_look_then_markers_objects_and_manifests(store: FakeStore) -> None:
    first, second, *_ = await chain(store, 3)
    store.calls.clear()
    await pruned(store)
    changes = [(method, key) for method, key in store.calls if method in ("put", "delete")]
    keys = [key.rpartition("/")[0] if key.startswith(PRUNED_PREFIX) else key for _, key in changes]
    pair = [f"{PRUNED_PREFIX}{one.info.save}" for one in (first, second)]
    assert keys[:2] == pair
    assert keys[2:4] == [marker_key(one.info) for one in (first, second)]
    assert keys[-2:] == pair
    assert keys[4:-2] == [
        file_key(first.info, "out/b.pt"),
        file_key(first.info, "out/c.pt"),
        file_key(second.info, "out/c.pt"),
        base_key(second.info),
    ]
    put, last_put = ([index for index, call in enumerate(store.calls) if call[0] == "put"][index] for index in (0, -1))
    assert {method for method, _ in store.calls[put : last_put + 1]} == {"put"}
    looks = [key for method, key in store.calls[last_put:] if method == "list"]
    assert looks[:2] == ["", ".mooring/"]


async def test_a_prune_costs_no_request_more_where_there_are_no_snapshots(store: FakeStore) -> None:
    for step in (1, 2, 3):
        await store_checkpoint(store, step)
    store.calls.clear()
    await pruned(store)
    listed = [key for method, key in store.calls if method == "list"]
    assert listed == [".mooring/commits/", "", "checkpoint-3/0123abcd-000003/"]
    # Marker and manifest of the newest, and the markers of what goes: they say whether it is final.
    assert len([key for method, key in store.calls if method == "get"]) == 2 + 2


async def test_snapshots_that_are_all_kept_cost_no_second_look(store: FakeStore) -> None:
    await chain(store, 2)
    store.calls.clear()
    await pruned(store, keep_last=2)
    assert [key for method, key in store.calls if method == "list"] == [".mooring/commits/", ""]
    assert not [key for method, key in store.calls if method == "get"]


async def reserving(store: FakeStore, base: RankManifest, number: int = 9) -> RankManifest:
    """A snapshot in progress that shares what `base` consists of. It is not committed."""
    files = output(a=1, b=base.info.step // 2, c=base.info.step, d=9)
    return await store_snapshot(store, number, files, base=base, committed=False)


async def test_a_reserved_snapshot_stays_until_the_one_in_progress_is_committed(store: FakeStore) -> None:
    manifests = await chain(store)
    in_progress = await reserving(store, manifests[1])
    report = await pruned(store)
    assert await left(store) == [4, 2]
    assert why_kept(report.plan)[manifests[1].info.save] == "a snapshot in progress shares its objects"
    assert tombstones(store) == []
    await commit(store, in_progress)
    await pruned(store)
    assert await left(store) == [9]


async def test_an_old_snapshot_in_progress_keeps_its_base_while_it_is_alive(store: FakeStore) -> None:
    manifests = await chain(store)
    in_progress = await reserving(store, manifests[1])
    store.now += 3 * DAY
    await store_snapshot(store, 10, output(a=1))
    store.now += 60
    await pruned(store, live=[in_progress.info.save])
    assert await left(store) == [10, 2]
    # Given up: first it goes, then its base.
    await pruned(store)
    assert objects_of(store, in_progress) == set()
    await pruned(store)
    assert await left(store) == [10]


async def test_a_snapshot_in_progress_stays_while_nothing_newer_of_its_series_is_committed(
    store: FakeStore,
) -> None:
    manifests = await chain(store)
    in_progress = await reserving(store, manifests[-1])
    store.now += 30 * DAY
    await chain(store, 3, series="node-1")
    await store_checkpoint(store, 1)
    await pruned(store)
    assert {"out/d.pt", ".mooring/base.json"} < objects_of(store, in_progress)
    await commit(store, in_progress)
    assert await left(store) == [9, 4]


class _WhileLooking(FakeStore):
    """Something happens as soon as a tombstone is there, before the prune looks."""

    def __init__(self, happens: Callable[["_WhileLooking"], Awaitable[object]]) -> None:
        super().__init__()
        self._happens = happens

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        happens = self._happens
        if tombstones(self) and happens is not _nothing:
            self._happens = _nothing
            await happens(self)
        async for one in super().list(prefix):
            yield one


async def _nothing(_: FakeStore) -> None:
    return None


async def test_a_reservation_that_appears_beside_the_tombstone_keeps_the_base() -> None:
    manifests: list[RankManifest] = []
    racing = _WhileLooking(lambda store: reserving(store, manifests[1]))
    manifests += await chain(racing)
    await pruned(racing)
    assert await left(racing) == [4, 2]
    assert tombstones(racing) == []


async def test_a_snapshot_that_commits_beside_the_tombstone_keeps_what_it_names() -> None:
    manifests: list[RankManifest] = []

    async def commits(store: FakeStore) -> None:
        await commit(store, in_progress)

    racing = _WhileLooking(commits)
    manifests += await chain(racing)
    in_progress = await reserving(racing, manifests[1])
    await pruned(racing)
    # The base may go: the manifest of the new one names its objects.
    assert await left(racing) == [9, 4]


@pytest.mark.parametrize("what", ["written", "committed"])
async def test_an_orphan_that_is_written_again_or_committed_meanwhile_is_left_alone(what: str) -> None:
    async def happens(store: FakeStore) -> None:
        if what == "committed":
            await commit(store, orphan)
        else:
            await store.put(base_key(orphan.info), encode_reservation(snapshot_id(first)))

    racing = _WhileLooking(happens)
    first = await store_snapshot(racing, 1, output(a=1))
    racing.now += 60
    orphan = await store_snapshot(racing, 2, output(b=1), committed=False)
    racing.now += 60
    for number in (3, 4):
        await store_snapshot(racing, number, output(c=number))
    racing.now += 3 * DAY
    await pruned(racing)
    assert file_key(orphan.info, "out/b.pt") in racing.objects


@pytest.mark.parametrize("series", ["node-0", "node-1"])
@pytest.mark.parametrize("what", ["missing", "changed"])
async def test_while_a_remaining_manifest_cannot_be_read_no_snapshot_goes(
    store: FakeStore, what: str, series: str
) -> None:
    manifests = await chain(store, 3)
    store.now -= 3600
    damaged = await store_snapshot(store, 1, output(z=1), series=series, save="0123abcd-100001")
    store.now += 3600
    key = manifest_key(damaged.info, 0, 1)
    await (store.delete(key) if what == "missing" else flip_byte(store, key, 40))
    for step in (1, 2):
        await store_checkpoint(store, step)
    report = await pruned(store, resumed_from=damaged.info.save)
    assert [one.step for one in (await list_snapshots(store))["node-0"]][:3] == [3, 2, 1]
    assert [one.step for one in await list_committed(store)] == [2]
    kept = why_kept(report.plan)
    assert all(key in kept[one.info.save] for one in manifests[:2])
    assert tombstones(store) == []


async def test_a_reservation_that_cannot_be_read_keeps_everything_until_it_is_old(store: FakeStore) -> None:
    await chain(store)
    key = base_key(snapshot_info(3, save="89abcdef-000003"))
    store.now -= 200
    await store.put(key, b"garbage")
    store.now += 200
    report = await pruned(store)
    assert await left(store) == [4, 3, 2, 1]
    assert key in why_kept(report.plan)["0123abcd-000001"]


async def test_trouble_with_the_store_stops_the_prune_before_it_deletes(store: FakeStore) -> None:
    manifests = await chain(store)
    in_progress = base_key(snapshot_info(9))
    await store.put(in_progress, encode_reservation(snapshot_id(manifests[0])))
    get = store.get

    async def fails(key: str, *, limit_bytes: int, fresh: bool = False) -> bytes:
        if key == in_progress:
            raise StoreError(ErrorKind.UNREACHABLE, "gone")
        return await get(key, limit_bytes=limit_bytes, fresh=fresh)

    store.get = fails  # type: ignore[method-assign]
    with pytest.raises(StoreError, match="gone"):
        await pruned(store)
    assert not [key for method, key in store.calls if method == "delete"]


async def test_old_tombstones_of_a_killed_prune_are_litter_and_young_ones_are_not(store: FakeStore) -> None:
    await chain(store, 1)
    await store.put(old := tombstone_key("0123abcd-000001", "old"), b"")
    store.now += 2 * DAY
    await store.put(young := tombstone_key("0123abcd-000001", "young"), b"")
    report = await pruned(store)
    assert report.litter == (old,)
    assert tombstones(store) == [young]


async def test_after_a_commit_the_series_alone_is_pruned_and_what_others_name_stays(store: FakeStore) -> None:
    for step in (100, 200):
        await store_checkpoint(store, step)
    first, *_ = await chain(store)
    await chain(store, 3, series="node-1")
    # A volume that came from another node: what it has not changed belongs to that node's snapshot.
    await store_snapshot(store, 9, output(a=1, c=9), base=first, series="node-7")
    store.calls.clear()
    report = await pruned_recent(store)
    listed = {key for method, key in store.calls if method == "list"}
    assert not listed & {"", ".mooring/", ".mooring/commits/"}
    assert [await left(store, series) for series in ("node-0", "node-1", "node-7")] == [[4], [3, 2, 1], [9]]
    assert [one.step for one in await list_committed(store)] == [200, 100]
    assert len(report.plan.deletions) == 3
    assert tombstones(store) == []


async def test_after_a_commit_a_reserved_snapshot_stays_whoever_reserves_it(store: FakeStore) -> None:
    manifests = await chain(store)
    files = output(a=1, c=9)
    await store_snapshot(store, 9, files, base=manifests[1], series="node-7", committed=False)
    report = await pruned_recent(store)
    assert await left(store) == [4, 2]
    assert why_kept(report.plan)[manifests[1].info.save] == "a snapshot in progress shares its objects"


@pytest.mark.parametrize("killed", [pruned, pruned_recent], ids=["of everything", "after a commit"])
async def test_a_prune_killed_at_any_step_leaves_all_whole_and_the_next_one_finishes(
    killed: Callable[..., Awaitable[PruneReport]],
) -> None:
    died, step = True, 0
    while died:
        store = FakeStore()
        manifests = await chain(store, 5)
        await chain(store, 3, series="node-1")
        step += 1
        _die_after(store, step)
        try:
            await killed(store, keep_last=2)
            died = False
        except _KilledError:
            pass
        _die_after(store, 0)
        assert (await left(store))[:2] == [5, 4]
        assert (await left(store, "node-1"))[:2] == [3, 2]
        store.now += 2 * DAY
        for number in (6, 7):
            await store_snapshot(store, number, output(a=1, b=9, c=number), base=manifests[-1])
            store.now += 60
        # After a kill the reservation of each one that lost its marker keeps its base for another round.
        for _ in range(4):
            await pruned(store, keep_last=2)
        assert await left(store) == [7, 6]
        assert tombstones(store) == []
        assert [objects_of(store, one) for one in manifests] == [
            {"out/a.pt", ".mooring/manifest-00000-00001.json"},
            *[set[str]()] * 4,
        ]
        await store.close()
    assert step > 10


class _KilledError(Exception):
    pass


def _die_after(store: FakeStore, changes: int) -> None:
    """Raise at a change of the store, before or after it takes effect. 0: never."""
    left_over = changes

    for method in ("put", "delete"):
        act = getattr(FakeStore, method)

        async def change(key: str, *arguments: object, act: object = act, **options: object) -> None:
            nonlocal left_over
            left_over -= 1
            if changes and left_over == 0 and changes % 2:
                raise _KilledError
            await act(store, key, *arguments, **options)  # type: ignore[operator]
            if changes and left_over == 0:
                raise _KilledError

        setattr(store, method, change)

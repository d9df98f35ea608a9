"""Pruning snapshots when one cannot be read, the store fails, or an earlier prune was killed."""

from collections.abc import Awaitable, Callable

import pytest
from tests.catalog.pruned_snapshots import DAY, chain, left, objects_of, pruned, pruned_recent, tombstones
from tests.catalog.stored_snapshots import output, snapshot_id, snapshot_info, store_snapshot
from tests.core.listings import why_kept
from tests.fakes.fake_store import FakeStore
from tests.restore.stored_checkpoints import flip_byte, store_checkpoint

from keepstep_agent.catalog.markers import list_committed, list_snapshots
from keepstep_agent.catalog.pruning import PruneReport
from keepstep_agent.core.errors import ErrorKind, StoreError
from keepstep_agent.core.stored.object_layout import base_key, manifest_key, tombstone_key
from keepstep_agent.core.stored.reservation import encode_reservation


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
            {"out/a.pt", ".keepstep/manifest-00000-00001.json"},
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

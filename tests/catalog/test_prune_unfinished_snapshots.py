"""Pruning beside snapshots in progress: what one shares stays, also if it begins or commits meanwhile."""

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from tests.catalog.pruned_snapshots import DAY, chain, left, objects_of, pruned, reserving, tombstones
from tests.catalog.stored_snapshots import commit, output, snapshot_id, snapshot_info, store_snapshot
from tests.core.listings import why_kept
from tests.fakes.fake_store import FakeStore
from tests.restore.stored_checkpoints import store_checkpoint

from keepstep_agent.core.model import RankManifest
from keepstep_agent.core.stored.object_layout import base_key, file_key
from keepstep_agent.core.stored.reservation import encode_reservation
from keepstep_agent.ports import ObjectInfo


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
    assert {"out/d.pt", ".keepstep/base.json"} < objects_of(store, in_progress)
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


async def test_a_reservation_that_cannot_be_read_keeps_everything_until_it_is_old(store: FakeStore) -> None:
    await chain(store)
    key = base_key(snapshot_info(3, save="89abcdef-000003"))
    store.now -= 200
    await store.put(key, b"garbage")
    store.now += 200
    report = await pruned(store)
    assert await left(store) == [4, 3, 2, 1]
    assert key in why_kept(report.plan)["0123abcd-000001"]

"""A commit beside other agents, who write and remove at the same time; and which marker means that a save is whole."""

import asyncio
from dataclasses import replace

import pytest
from tests.fakes.fake_store import FakeStore

from mooring_agent.core.agent.commands import Commit
from mooring_agent.core.agent.events import Committed, CommitWaits
from mooring_agent.core.agent.work import Operation, WorkId
from mooring_agent.core.errors import ErrorKind, StoreError
from mooring_agent.core.model import AnnouncementTime, FileEntry, Kind, RankManifest, SaveInfo
from mooring_agent.core.stored.manifest import encode_manifest
from mooring_agent.core.stored.object_layout import manifest_key, marker_key
from mooring_agent.runtime.process.app import SystemClock
from mooring_agent.runtime.work.committer import commit, is_committed

INFO = SaveInfo(save="save", name="checkpoint-1", step=1, kind=Kind.PERIODIC, world_size=2)
MINE, OTHER = (RankManifest(info=INFO, rank=rank, saved_at=1.0, files=()) for rank in range(2))
FILE = FileEntry(path="empty", size_bytes=0, part_size_bytes=1, checksums=())
COMMIT = Commit(
    work=WorkId(Operation.COMMIT, "save"), info=INFO, manifests=(MINE,), may_write_marker=True, sweep_uploads=False
)


async def test_another_ranks_manifest_that_vanished_since_the_listing_is_waited_for() -> None:
    store, clock = FakeStore(), SystemClock()
    for manifest in (MINE, OTHER):
        await store.put(manifest_key(INFO, manifest.rank), encode_manifest(manifest))
    # The marker, which is not there, and the manifest.
    store.fail("get", ErrorKind.NOT_FOUND, times=2)
    waits = await commit(store, clock, COMMIT)
    assert isinstance(waits, CommitWaits)
    assert waits.missing_ranks == 1
    assert isinstance(await commit(store, clock, COMMIT), Committed)


async def test_an_agent_that_finds_the_marker_reads_nothing_else() -> None:
    info = replace(INFO, world_size=300)
    store, _ = await _committed(info)
    store.calls.clear()
    mine = replace(MINE, info=info, rank=7)
    command = replace(COMMIT, info=info, manifests=(mine,), may_write_marker=False)
    assert isinstance(await commit(store, SystemClock(), command), Committed)
    assert store.calls == [("get", marker_key(info))]


async def test_a_marker_that_does_not_name_what_this_agent_has_sent_is_no_commit_of_it() -> None:
    store, _ = await _committed()
    other = replace(MINE, saved_at=2.0)
    await store.put(manifest_key(INFO, 0), encode_manifest(other))
    with pytest.raises(StoreError, match="does not match the manifests"):
        await commit(store, SystemClock(), replace(COMMIT, manifests=(other,)))


async def test_the_manifests_of_many_ranks_are_read_sixteen_at_a_time() -> None:
    class Slow(FakeStore):
        reading = most = 0

        async def get(self, key: str, *, limit_bytes: int, fresh: bool = False) -> bytes:
            self.reading += 1
            self.most = max(self.most, self.reading)
            await asyncio.sleep(0)
            self.reading -= 1
            return await super().get(key, limit_bytes=limit_bytes, fresh=fresh)

    store = Slow()
    info = replace(INFO, world_size=100)
    manifests = [replace(MINE, info=info, rank=rank) for rank in range(info.world_size)]
    for manifest in manifests:
        await store.put(manifest_key(info, manifest.rank), encode_manifest(manifest))
    command = replace(COMMIT, info=info, manifests=(manifests[0],))
    assert isinstance(await commit(store, SystemClock(), command), Committed)
    assert store.most == 16


@pytest.mark.parametrize("bytes_left", [0, 100])
async def test_a_marker_that_was_cut_short_is_written_again(bytes_left: int) -> None:
    store, clock = FakeStore(), SystemClock()
    for manifest in (MINE, OTHER):
        await store.put(manifest_key(INFO, manifest.rank), encode_manifest(manifest))
    await commit(store, clock, COMMIT)
    whole = await store.get(marker_key(INFO), limit_bytes=10_000)
    await store.put(marker_key(INFO), whole[:bytes_left])

    assert isinstance(await commit(store, clock, COMMIT), Committed)
    assert await store.get(marker_key(INFO), limit_bytes=10_000) == whole


async def _committed(info: SaveInfo = INFO) -> tuple[FakeStore, bytes]:
    """A store with a save of empty ranks, and its marker."""
    store = FakeStore()
    manifests = [replace(MINE, info=info, rank=rank) for rank in range(info.world_size)]
    for manifest in manifests:
        await store.put(manifest_key(info, manifest.rank), encode_manifest(manifest))
    await commit(store, SystemClock(), replace(COMMIT, info=info, manifests=(manifests[0],)))
    return store, store.objects[marker_key(info)].body


async def _is_committed(store: FakeStore, *, at: float = MINE.saved_at) -> bool:
    return await is_committed(store, INFO, {0: AnnouncementTime(at=at)})


async def test_a_save_with_its_own_whole_marker_is_committed() -> None:
    store, _ = await _committed()
    assert await _is_committed(store)


@pytest.mark.parametrize("damaged", [b"", b'{"half', b"garbage of another"])
async def test_a_marker_that_cannot_be_read_commits_nothing(damaged: bytes) -> None:
    store, _ = await _committed()
    await store.put(marker_key(INFO), damaged)
    assert not await _is_committed(store)


async def test_a_marker_that_lost_its_end_commits_nothing() -> None:
    store, whole = await _committed()
    await store.put(marker_key(INFO), whole[:-1])
    assert not await _is_committed(store)


async def test_a_marker_that_is_damaged_on_the_way_alone_is_read_again() -> None:
    class _BadLine(FakeStore):
        async def get(self, key: str, *, limit_bytes: int, fresh: bool = False) -> bytes:
            body = await super().get(key, limit_bytes=limit_bytes, fresh=fresh)
            return body if fresh else body[:-1]

    kept, _ = await _committed()
    store = _BadLine()
    store.objects = kept.objects
    assert await _is_committed(store)


@pytest.mark.parametrize(
    "changed", [replace(INFO, kind=Kind.FINAL), replace(INFO, world_size=1)], ids=["kind", "world"]
)
async def test_a_whole_marker_of_another_save_is_a_contradiction(changed: SaveInfo) -> None:
    """Its key has the step and the save id alone."""
    store, _ = await _committed()
    _, marker = await _committed(changed)
    await store.put(marker_key(INFO), marker)
    await _refuses(store)


async def test_a_marker_that_names_another_manifest_than_the_stored_one_is_a_contradiction() -> None:
    store, _ = await _committed()
    await store.put(manifest_key(INFO, 0), encode_manifest(replace(MINE, files=(FILE,))))
    await _refuses(store)


async def test_a_damaged_marker_beside_the_manifest_of_another_announcement_is_a_contradiction() -> None:
    """Nothing of ours may be written over the files of that save."""
    store, whole = await _committed()
    await store.put(marker_key(INFO), whole[:100])
    await _refuses(store, at=MINE.saved_at + 1.0)


async def _refuses(store: FakeStore, *, at: float = MINE.saved_at) -> None:
    with pytest.raises(StoreError) as caught:
        await _is_committed(store, at=at)
    assert caught.value.kind is ErrorKind.CONTRADICTION

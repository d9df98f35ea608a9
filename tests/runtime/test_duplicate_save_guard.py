"""A save may be uploaded only if its id is new, or if the save committed under that id is the same."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from tests.core.play import Play
from tests.fakes.fake_store import FakeStore
from tests.restore.stored_checkpoints import store_checkpoint, store_ranks

from keepstep_agent.core.errors import ErrorKind, StoreError
from keepstep_agent.core.model import AnnouncementTime, FileEntry, Kind, RankManifest, SaveInfo
from keepstep_agent.core.stored.manifest import encode_manifest
from keepstep_agent.core.stored.object_layout import manifest_key, marker_key
from keepstep_agent.ports import ObjectInfo
from keepstep_agent.runtime.work.duplicate_save_guard import DuplicateSaveGuard, is_committed


class _StoreThatTakesTime(FakeStore):
    """Others have their turn before it answers."""

    async def get(self, key: str, *, limit_bytes: int, fresh: bool = False) -> bytes:
        await asyncio.sleep(0)
        return await super().get(key, limit_bytes=limit_bytes, fresh=fresh)


@pytest.fixture
async def store() -> AsyncIterator[FakeStore]:
    store = _StoreThatTakesTime()
    yield store
    await store.close()


@pytest.fixture
def play() -> Play:
    """Rank 0 of two announced save "save" of step 1, at 100 seconds."""
    play = Play()
    play.announce("save", world_size=2)
    return play


async def _refusal(look: DuplicateSaveGuard, store: FakeStore) -> ErrorKind:
    with pytest.raises(StoreError) as caught:
        await look.require_new(store, "save")
    return caught.value.kind


async def test_a_new_save_costs_one_request_however_many_files_it_has(store: FakeStore, play: Play) -> None:
    look = DuplicateSaveGuard(lambda: play.state)
    await asyncio.gather(*(look.require_new(store, "save") for _ in range(8)))
    assert store.calls == [("list", marker_key(play.state.checkpoints["save"].info).removesuffix(".json"))]


async def test_a_save_id_that_another_output_directory_has_is_refused(store: FakeStore, play: Play) -> None:
    """The objects of both would have the same keys."""
    await store_checkpoint(store, 1, save="save", world_size=2, saved_at=100.0, directory="elsewhere")
    assert await _refusal(DuplicateSaveGuard(lambda: play.state), store) is ErrorKind.CONTRADICTION


async def test_a_committed_save_that_was_announced_at_another_time_is_another_one(store: FakeStore, play: Play) -> None:
    await store_checkpoint(store, 1, save="save", world_size=2, saved_at=99.0)
    assert await _refusal(DuplicateSaveGuard(lambda: play.state), store) is ErrorKind.CONTRADICTION


async def test_a_committed_save_of_fewer_ranks_is_another_one(store: FakeStore, play: Play) -> None:
    info = await store_checkpoint(store, 1, save="save", world_size=2, saved_at=100.0)
    await store.delete(manifest_key(info, 0, 1))
    assert await _refusal(DuplicateSaveGuard(lambda: play.state), store) is ErrorKind.CONTRADICTION


async def test_the_marker_that_another_agent_wrote_for_our_own_manifest_is_no_reason_to_stop(
    store: FakeStore, play: Play
) -> None:
    await store_checkpoint(store, 1, save="save", world_size=2, saved_at=100.0)
    await DuplicateSaveGuard(lambda: play.state).require_new(store, "save")


async def test_a_marker_of_ours_that_was_cut_short_is_no_reason_to_stop(store: FakeStore, play: Play) -> None:
    info = await store_checkpoint(store, 1, save="save", world_size=2, saved_at=100.0)
    await store.put(marker_key(info), b"")
    await DuplicateSaveGuard(lambda: play.state).require_new(store, "save")


class _TakesTime(FakeStore):
    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        await asyncio.sleep(0)
        async for one in super().list(prefix):
            yield one


async def test_transfers_that_wait_for_one_look_fail_with_it_and_the_next_looks_again(play: Play) -> None:
    store = _TakesTime()
    look = DuplicateSaveGuard(lambda: play.state)
    store.fail("list", ErrorKind.UNREACHABLE)
    assert await asyncio.gather(*(_refusal(look, store) for _ in range(3))) == [ErrorKind.UNREACHABLE] * 3
    assert len(store.calls) == 1
    await look.require_new(store, "save")
    assert len(store.calls) == 2


INFO = SaveInfo(save="save", name="checkpoint-1", step=1, kind=Kind.PERIODIC, world_size=2)
MINE = RankManifest(info=INFO, rank=0, saved_at=1.0, files=())


async def _committed(info: SaveInfo = INFO) -> tuple[FakeStore, bytes]:
    """A store with a save of empty ranks, one for each agent, and its marker."""
    store = FakeStore()
    await store_ranks(store, [[replace(MINE, info=info, rank=rank)] for rank in range(info.world_size)])
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
    changed = replace(MINE, files=(FileEntry(path="empty", size_bytes=0, part_size_bytes=1, checksums=()),))
    await store.put(manifest_key(INFO, 0, 1), encode_manifest([changed]))
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


@pytest.mark.parametrize(("ours", "reads"), [((8, 9), 1), ((9, 8), 1), ((0, 10), 3)])
async def test_the_manifest_of_our_ranks_is_mostly_the_only_one_that_is_read(ours: tuple[int, ...], reads: int) -> None:
    info = replace(INFO, world_size=12)
    agents = (
        [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9), (10, 11)] if 8 in ours else [(0, 10), (1, 2, 3, 4, 5), (6, 7, 8, 9, 11)]
    )
    store = FakeStore()
    await store_ranks(store, [[replace(MINE, info=info, rank=rank) for rank in ranks] for ranks in agents])
    store.calls.clear()
    times = dict.fromkeys(ours, AnnouncementTime(at=MINE.saved_at))
    assert await is_committed(store, info, times)
    assert sum("/manifest-" in key for _, key in store.calls) == reads
    with pytest.raises(StoreError, match="committed already"):
        await is_committed(store, info, dict.fromkeys(ours, AnnouncementTime(at=MINE.saved_at + 1.0)))

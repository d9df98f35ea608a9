"""A save may be uploaded only if its id is new, or if the save committed under that id is the same."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from tests.core.play import Play
from tests.fakes.fake_store import FakeStore
from tests.restore.stored_checkpoints import store_checkpoint

from mooring_agent.core.errors import ErrorKind, StoreError
from mooring_agent.core.stored.object_layout import manifest_key, marker_key
from mooring_agent.runtime.work.committer import DuplicateSaveGuard


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
    assert store.calls == [("get", marker_key(play.state.checkpoints["save"].info))]


async def test_a_committed_save_that_was_announced_at_another_time_is_another_one(store: FakeStore, play: Play) -> None:
    await store_checkpoint(store, 1, save="save", world_size=2, saved_at=99.0)
    assert await _refusal(DuplicateSaveGuard(lambda: play.state), store) is ErrorKind.CONTRADICTION


async def test_a_committed_save_of_fewer_ranks_is_another_one(store: FakeStore, play: Play) -> None:
    info = await store_checkpoint(store, 1, save="save", world_size=2, saved_at=100.0)
    await store.delete(manifest_key(info, 0))
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


async def test_transfers_that_wait_for_one_look_fail_with_it_and_the_next_looks_again(
    store: FakeStore, play: Play
) -> None:
    look = DuplicateSaveGuard(lambda: play.state)
    store.fail("get", ErrorKind.UNREACHABLE)
    assert await asyncio.gather(*(_refusal(look, store) for _ in range(3))) == [ErrorKind.UNREACHABLE] * 3
    assert len(store.calls) == 1
    await look.require_new(store, "save")
    assert len(store.calls) == 2

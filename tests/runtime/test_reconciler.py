"""After a restart: a save counts as committed, and its pins go, only with a whole marker of this very save."""

from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from tests.core.play import PART_BYTES, Play
from tests.fakes.fake_store import FakeStore
from tests.restore.stored_checkpoints import store_checkpoint

from keepstep_agent.adapters.volume.staging_area import LocalStagingArea
from keepstep_agent.core.agent.commands import Reconcile
from keepstep_agent.core.agent.events import Committed, Started
from keepstep_agent.core.agent.work import Operation, WorkId
from keepstep_agent.core.errors import ErrorKind, StoreError, VolumeError
from keepstep_agent.core.model import AnnouncementTime, Phase
from keepstep_agent.core.stored.object_layout import marker_key
from keepstep_agent.runtime.process.app import SystemClock
from keepstep_agent.runtime.work.reconciler import Reconciler


@pytest.fixture
async def store() -> AsyncIterator[FakeStore]:
    """Has the save, committed at 100 seconds."""
    store = FakeStore()
    await store_checkpoint(store, 1, save="save", world_size=1, saved_at=100.0)
    yield store
    await store.close()


def _restarted() -> tuple[Play, Reconcile]:
    """An agent that had announced the save at 100 seconds and not seen it committed; its pins are gone."""
    play = Play()
    play.announce("save", (PART_BYTES,))
    play.in_flight.clear()
    play.feed(Started(at=play.now, fresh=False))
    (command,) = play.in_flight.values()
    assert isinstance(command, Reconcile)
    return play, command


async def _reconciled(store: FakeStore, tmp_path: Path, command: Reconcile) -> object:
    with ThreadPoolExecutor(1) as executor:
        reconciler = Reconciler(
            staging=LocalStagingArea(tmp_path), clock=SystemClock(), executor=executor, volume=tmp_path
        )
        return await reconciler.reconcile(store, command)


async def test_a_marker_counts_more_than_pins_that_are_gone(store: FakeStore, tmp_path: Path) -> None:
    play, command = _restarted()
    found = await _reconciled(store, tmp_path, command)
    assert isinstance(found, Committed)
    play.feed(found)
    assert play.phase("save") is Phase.COMMITTED
    assert WorkId(Operation.RELEASE, "save") in play.in_flight


async def test_the_marker_of_another_announcement_is_a_contradiction(store: FakeStore, tmp_path: Path) -> None:
    _, command = _restarted()
    with pytest.raises(StoreError, match="committed already"):
        await _reconciled(store, tmp_path, replace(command, announced_at=((0, AnnouncementTime(at=99.0)),)))


@pytest.mark.parametrize("marker", [b"", b'{"half', b"garbage of another"])
async def test_a_damaged_marker_does_not_count_and_the_pins_are_looked_for(
    store: FakeStore, tmp_path: Path, marker: bytes
) -> None:
    _, command = _restarted()
    await store.put(marker_key(command.info), marker)
    with pytest.raises(VolumeError) as caught:
        await _reconciled(store, tmp_path, command)
    assert caught.value.kind is ErrorKind.FILE_MISSING


async def test_what_was_found_by_its_record_may_have_been_committed_since_by_an_earlier_agent(
    store: FakeStore, tmp_path: Path
) -> None:
    _, command = _restarted()
    # The two clocks may differ by some seconds.
    for recorded_at in (50.0, 104.0):
        time = AnnouncementTime(at=5000.0, recorded_at=recorded_at)
        assert isinstance(await _reconciled(store, tmp_path, replace(command, announced_at=((0, time),))), Committed)


async def test_what_was_recorded_after_a_commit_is_another_save(store: FakeStore, tmp_path: Path) -> None:
    _, command = _restarted()
    time = AnnouncementTime(at=5000.0, recorded_at=4000.0)
    with pytest.raises(StoreError, match="committed already"):
        await _reconciled(store, tmp_path, replace(command, announced_at=((0, time),)))

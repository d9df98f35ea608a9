"""Announcements that meet failures of other ranks."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.core.play import Play
from tests.fakes.fake_journal import FakeJournal

from mooring_agent.adapters.clock import SystemClock
from mooring_agent.adapters.volume.staging_area import LocalStagingArea
from mooring_agent.core.errors import ErrorKind, RequestError
from mooring_agent.core.events import WorkFailed
from mooring_agent.core.work import Operation, WorkId
from mooring_agent.runtime.announcements import Announcements
from mooring_agent.runtime.engine import Engine
from mooring_api.v1 import agent_pb2


def _request(rank: int) -> agent_pb2.AnnounceCheckpointRequest:
    return agent_pb2.AnnounceCheckpointRequest(
        path=f"/volume/rank-{rank}", step=1, name="checkpoint-1", save="save", rank=rank, world_size=2
    )


async def test_a_rank_whose_save_failed_and_was_announced_again_by_another_is_told_that_it_failed(
    tmp_path: Path,
) -> None:
    clock = SystemClock()
    with ThreadPoolExecutor(1) as executor:
        engine = Engine(state=Play().state, journal=FakeJournal(), clock=clock, executor=executor)
        announcements = Announcements(
            engine=engine,
            clock=clock,
            executor=executor,
            volume=tmp_path,
            staging=LocalStagingArea(tmp_path),
            workers=executor,
        )
        async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
            running = tasks.create_task(engine.run(lambda command: None))
            first = tasks.create_task(_outcome(announcements, 0))
            await engine.until(lambda state: "save" in state.checkpoints)
            # Both in one turn of the engine: the first rank never sees the failure itself.
            work = WorkId(Operation.STAGE, "save", 0)
            kind = ErrorKind.FILE_MISSING
            engine.post(WorkFailed(at=clock.now(), work=work, kind=kind, message="gone", hint="", jitter=0.0))
            await announcements.enter(_request(1))
            error = await first
            running.cancel()
    assert error.kind is ErrorKind.CHECKPOINT_FAILED
    assert "without rank 0" in str(error)


async def _outcome(announcements: Announcements, rank: int) -> RequestError:
    with pytest.raises(RequestError) as caught:
        await announcements.announce(_request(rank))
    return caught.value

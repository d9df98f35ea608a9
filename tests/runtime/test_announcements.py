"""Announcements that meet failures of other ranks, and files that are not those which were announced."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from tests.core.play import Play
from tests.fakes.fake_journal import FakeJournal
from tests.harness.bounds import HANG_SECONDS

from keepstep_agent.adapters.volume.own_entries import AGENT_NOTE
from keepstep_agent.adapters.volume.shared_folders import make_state_directory
from keepstep_agent.adapters.volume.staging_area import LocalStagingArea
from keepstep_agent.adapters.volume.work_note import WorkNote
from keepstep_agent.core.agent.commands import Command, Exit, Stage
from keepstep_agent.core.agent.events import Announced, Released, Started, StopRequested, Ticked, WorkFailed
from keepstep_agent.core.agent.work import Operation, WorkId
from keepstep_agent.core.errors import ErrorKind, RequestError, VolumeError
from keepstep_agent.core.policies.repeated_deaths import Task, announcement_of
from keepstep_agent.runtime.engine.engine import Engine
from keepstep_agent.runtime.process.app import SystemClock
from keepstep_agent.runtime.work.announcements import Announcement, Announcements
from keepstep_agent.runtime.work.transfers import stage
from keepstep_api.names import NOT_DURABLE_EXIT_CODE


def _request(rank: int) -> Announcement:
    return Announcement(path=f"/volume/rank-{rank}", step=1, name="checkpoint-1", save="save", rank=rank, world_size=2)


async def test_a_rank_whose_save_failed_and_was_announced_again_by_another_is_told_that_it_failed(
    tmp_path: Path,
) -> None:
    clock = SystemClock()
    with ThreadPoolExecutor(1) as executor:
        engine = Engine(state=Play().state, journal=FakeJournal(), clock=clock, executor=executor)
        announcements = Announcements(
            engine=engine,
            clock=clock,
            volume=tmp_path,
            checkpoint_directory=tmp_path / "checkpoints",
            staging=LocalStagingArea(tmp_path),
            workers=executor,
        )
        async with asyncio.timeout(HANG_SECONDS), asyncio.TaskGroup() as tasks:
            running = tasks.create_task(engine.run(lambda command: None))
            first = tasks.create_task(_outcome(announcements, 0))
            await engine.until(lambda state: "save" in state.checkpoints)
            # Both in one turn of the engine: the first rank never sees the failure itself.
            work = WorkId(Operation.STAGE, "save", 0)
            kind = ErrorKind.FILE_MISSING
            engine.post(WorkFailed(at=clock.now(), work=work, kind=kind, message="gone", hint="", jitter=0.0))
            event = Announced(
                at=clock.now(),
                info=engine.state.checkpoints["save"].info,
                rank=1,
                path="/volume/rank-1",
                files=(),
                local_world_size=1,
            )
            await engine.submit(event, lambda state: True)
            error = await first
            running.cancel()
    assert error.kind is ErrorKind.CHECKPOINT_FAILED
    assert "without rank 0" in str(error)


async def _outcome(announcements: Announcements, rank: int) -> RequestError:
    with pytest.raises(RequestError) as caught:
        await announcements.announce(_request(rank))
    return caught.value


class _Clock(SystemClock):
    """One that may be set back, as between two lives of an agent."""

    lag_seconds = 0.0

    def now(self) -> float:
        return super().now() - self.lag_seconds


class _Agent:
    """As much of one as takes announcements and tells what it would stage."""

    def __init__(self, volume: Path, executor: ThreadPoolExecutor, note: WorkNote | None) -> None:
        self.clock = _Clock()
        self.commands: list[Command] = []
        self.executor = executor
        self.staging = LocalStagingArea(volume)
        self.engine = Engine(state=Play().state, journal=FakeJournal(), clock=self.clock, executor=executor, note=note)
        if note is not None:
            self.engine.post(Started(at=self.clock.now(), fresh=False, suspects=note.suspects))
        self.announcements = Announcements(
            engine=self.engine,
            clock=self.clock,
            volume=volume,
            checkpoint_directory=volume / "checkpoints",
            staging=self.staging,
            workers=executor,
        )

    async def stage(self) -> None:
        """What was announced so far, as it was journaled."""
        await self.engine.until(lambda state: any(isinstance(command, Stage) for command in self.commands))
        (command,) = [command for command in self.commands if isinstance(command, Stage)]
        await stage(self.staging, self.clock, self.executor, command)


@asynccontextmanager
async def _agent(volume: Path, note: WorkNote | None = None) -> AsyncIterator[_Agent]:
    with ThreadPoolExecutor(1) as executor:
        agent = _Agent(volume, executor, note)
        async with asyncio.timeout(HANG_SECONDS), asyncio.TaskGroup() as tasks:
            running = tasks.create_task(agent.engine.run(agent.commands.append))
            try:
                yield agent
            finally:
                running.cancel()


async def test_an_announcement_that_killed_two_agents_is_refused_until_all_else_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They died while they looked at its files, so the journal has no save that could be set aside."""
    state_directory = tmp_path / ".keepstep" / "agent"
    make_state_directory(tmp_path, state_directory)
    page = state_directory / AGENT_NOTE
    make_durable = LocalStagingArea.make_durable
    at_death: list[bytes] = []

    def watched(staging: LocalStagingArea, path: str, files: Sequence[str]) -> None:
        at_death.append(page.read_bytes())
        make_durable(staging, path, files)

    monkeypatch.setattr(LocalStagingArea, "make_durable", watched)
    for step in (1, 2):
        _write(tmp_path / f"checkpoint-{step}", "model")
    fatal, other = (Announcement(path=str(tmp_path / f"checkpoint-{step}"), step=step) for step in (1, 2))
    for _ in range(2):
        async with _agent(tmp_path, WorkNote(tmp_path, state_directory, AGENT_NOTE, now=1.0)) as agent:
            await agent.announcements.enter(fatal)
        # As they left it when they died.
        page.write_bytes(at_death[-1])
    async with _agent(tmp_path, WorkNote(tmp_path, state_directory, AGENT_NOTE, now=2.0)) as agent:
        event = await agent.announcements.enter(other)
        with pytest.raises(RequestError, match="checkpoint-1 is set aside") as caught:
            await agent.announcements.enter(fatal)
        assert "keepstep.dev/memory" in caught.value.hint
        work = WorkId(Operation.STAGE, event.info.save, 0)
        agent.engine.post(
            WorkFailed(at=2.0, work=work, kind=ErrorKind.FILE_MISSING, message="gone", hint="", jitter=0.0)
        )
        release = WorkId(Operation.RELEASE, event.info.save)
        await agent.engine.until(lambda state: release in state.in_flight)
        agent.engine.post(Released(at=2.0, work=release))
        await agent.engine.until(lambda state: not state.in_flight)
        await agent.announcements.enter(fatal)
        await agent.engine.until(lambda state: not state.suspects)


async def test_an_announcement_that_killed_its_agent_alone_waits_from_the_first_moment_and_is_named_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls are served before the engine's first turn."""
    state_directory = tmp_path / ".keepstep" / "agent"
    make_state_directory(tmp_path, state_directory)
    _write(tmp_path / "checkpoint-1", "model")
    request = Announcement(path=str(tmp_path / "checkpoint-1"), step=1)
    work = announcement_of(request.path)
    for _ in range(3):
        note = WorkNote(tmp_path, state_directory, AGENT_NOTE, now=time.time())
        note.write({work: Task(doing="look", title="checkpoint-1")}, note.suspects)
    async with _agent(tmp_path, WorkNote(tmp_path, state_directory, AGENT_NOTE, now=time.time())) as agent:
        with pytest.raises(RequestError, match="checkpoint-1 is set aside"):
            await agent.announcements.enter(request)
        agent.engine.post(StopRequested(at=time.time(), trainers_gone=True))
        await agent.engine.until(lambda state: any(isinstance(command, Exit) for command in agent.commands))
    (left,) = [command for command in agent.commands if isinstance(command, Exit)]
    assert left.code == NOT_DURABLE_EXIT_CODE
    assert "checkpoint-1: set aside" in left.lost[0]


async def test_of_several_who_look_at_one_announcement_the_last_ends_its_note(tmp_path: Path) -> None:
    state_directory = tmp_path / ".keepstep" / "agent"
    make_state_directory(tmp_path, state_directory)
    work = announcement_of("/volume/checkpoint-1")
    note = WorkNote(tmp_path, state_directory, AGENT_NOTE, now=1.0)
    note.write({work: Task(doing="look", title="checkpoint-1")}, note.suspects)
    async with _agent(tmp_path, WorkNote(tmp_path, state_directory, AGENT_NOTE, now=2.0)) as agent:
        await agent.engine.until(lambda state: work in state.suspects)
        with agent.engine.doing(work, "checkpoint-1"):
            with agent.engine.doing(work, "checkpoint-1"):
                pass
            await agent.engine.submit(Ticked(at=3.0))
            assert work in agent.engine.state.suspects
            assert work.encode() in (state_directory / AGENT_NOTE).read_bytes().split(b"suspects")[0]
        with suppress(asyncio.CancelledError), agent.engine.doing(work, "checkpoint-1"):
            # Its thread may go on.
            raise asyncio.CancelledError
        await agent.engine.until(lambda state: work not in state.suspects)


def _write(checkpoint: Path, name: str, content: bytes = b"weights") -> None:
    checkpoint.mkdir(exist_ok=True)
    (checkpoint / name).write_bytes(content)


@pytest.mark.parametrize("files", [(), ("model",)])
async def test_another_checkpoint_that_took_the_place_of_the_announced_one_is_not_staged_for_it(
    tmp_path: Path, files: tuple[str, ...]
) -> None:
    """An agent that died before it staged does so when it is back; the next attempt may have saved that step again."""
    checkpoint = tmp_path / "checkpoint-1"
    request = Announcement(path=str(checkpoint), step=1, save="save", files=files)
    async with _agent(tmp_path) as agent:
        _write(checkpoint, "model")
        await agent.announcements.enter(request)
        checkpoint.rename(tmp_path / "old")
        _write(checkpoint, "model", b"WEIGHTS")
        with pytest.raises(VolumeError, match="was written to after it was announced") as caught:
            await agent.stage()
    assert caught.value.kind is ErrorKind.FILE_CHANGED


async def test_what_is_a_file_of_the_save_and_the_program_s_too_counts_as_one_of_the_save(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint-1"
    others = ("train.log", "model", "train.log")
    request = Announcement(path=str(checkpoint), step=1, save="save", files=("model",), others=others)
    async with _agent(tmp_path) as agent:
        for name in ("model", "train.log", "unlisted"):
            _write(checkpoint, name)
        event = await agent.announcements.enter(request)
        assert (event.files, event.others) == (("model",), ("train.log",))
        # The program goes on.
        _write(checkpoint, "train.log", b"weights and more")
        await agent.stage()
    staged = tmp_path / ".keepstep" / "staged" / "save" / "rank-00000"
    assert {path.name: path.read_bytes() for path in staged.iterdir()} == {
        "model": b"weights",
        "train.log": b"weights and more",
    }


@pytest.mark.parametrize("files", [(), ("rank-0", "rank-1")], ids=["everything in it", "the same files"])
@pytest.mark.parametrize("clock_is_set_back", [False, True])
async def test_what_a_rank_writes_after_another_has_announced_their_directory_belongs_to_it(
    tmp_path: Path, clock_is_set_back: bool, files: tuple[str, ...]
) -> None:
    checkpoint = tmp_path / "checkpoint-1"
    requests = [
        Announcement(
            path=str(checkpoint), step=1, save="save", rank=rank, world_size=2, local_world_size=2, files=files
        )
        for rank in range(2)
    ]
    async with _agent(tmp_path) as agent:
        for request in requests:
            _write(checkpoint, f"rank-{request.rank}")
            await agent.announcements.enter(request)
            agent.clock.lag_seconds = 100.0 if clock_is_set_back else 0.0
        await agent.stage()
        assert not agent.engine.state.checkpoints["save"].ended

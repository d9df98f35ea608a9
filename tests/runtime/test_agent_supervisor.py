"""The agent supervisor with small programs instead of an agent: when it restarts one, and what it tells each."""

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from tests.harness.bounds import HANG_SECONDS

from keepstep_agent.core.errors import ErrorKind, KeepstepError
from keepstep_agent.runtime.process import agent_supervisor
from keepstep_agent.runtime.process.agent_supervisor import AgentSupervisor, Notify, RestartBackoff
from keepstep_api.v1 import agent_pb2

# Begins when it is told to. Writes down its pid; ends with the code that somebody gives it, and in order when it is
# terminated.
AGENT = """
import os, signal, sys, time
from pathlib import Path
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
folder = Path(sys.argv[1])
(folder / "loaded").touch()
if not sys.stdin.buffer.read(1):
    sys.exit(0)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
(folder / "pid.new").write_text(str(os.getpid()))
(folder / "pid.new").rename(folder / "pid")
deadline = time.monotonic() + 600
while time.monotonic() < deadline:
    if (folder / "leave").exists():
        sys.exit(int((folder / "leave").read_text()))
    time.sleep(0.01)
"""
GRACE_SECONDS = 3600.0
"""Longer than any test: nobody waits for its end."""


class Stage:
    """What the keeper sees of the agent, and what it tells it."""

    def __init__(self, folder: Path, *, grace_seconds: float = GRACE_SECONDS, notify: Notify | None = None) -> None:
        self.folder = folder
        self.deaf = False
        self.told: list[tuple[float, str, bool, float]] = []
        self.keeper = AgentSupervisor(
            (sys.executable, "-c", AGENT, str(folder)),
            environment=os.environ,
            grace_seconds=grace_seconds,
            notify=notify or self._notify,
            answers=self._answers,
        )

    def pid(self) -> int | None:
        # The keeper asks in a thread of its own, while `die` takes it away.
        try:
            return int((self.folder / "pid").read_text())
        except FileNotFoundError:
            return None

    def leave(self, code: int) -> None:
        (self.folder / "leave.new").write_text(str(code))
        (self.folder / "leave.new").rename(self.folder / "leave")

    async def die(self) -> None:
        """SIGKILL, and wait until the next one answers."""
        pid = self.pid()
        assert pid is not None
        (self.folder / "pid").unlink()
        os.kill(pid, signal.SIGKILL)
        await self.until(lambda: self.pid() is not None)

    async def stop(self) -> None:
        """SIGSTOP: it is there and does nothing any more."""
        pid = self.pid()
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        await self.until(lambda: not is_running(pid))

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(HANG_SECONDS):
            while not holds():  # noqa: ASYNC110 - other processes and threads change it
                await asyncio.sleep(0.01)

    def _answers(self) -> bool:
        pid = self.pid()
        return pid is not None and is_running(pid)

    def _notify(self, request: agent_pb2.NotifyTerminationRequest) -> None:
        if self.deaf or not self._answers():
            raise KeepstepError(ErrorKind.UNREACHABLE, "it does not listen")
        self.told.append((request.grace_seconds, request.source, request.trainers_gone, request.trainers_failed_at))


def is_running(pid: int) -> bool:
    """It exists, and nobody has stopped it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "RSD"
    except (FileNotFoundError, ProcessLookupError):
        # Before it was opened, or before it was read.
        return False


@asynccontextmanager
async def serving(folder: Path, *, grace_seconds: float = GRACE_SECONDS) -> AsyncIterator[Stage]:
    stage = Stage(folder, grace_seconds=grace_seconds)
    await stage.keeper.start()
    try:
        yield stage
    finally:
        stage.leave(0)
        await stage.keeper.end()


async def test_an_agent_that_has_only_loaded_begins_when_it_is_told(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    stage.keeper.load()
    await stage.until((tmp_path / "loaded").exists)
    assert stage.pid() is None
    await stage.keeper.start()
    assert stage.pid() is not None
    await stage.keeper.end()


async def test_an_agent_that_dies_while_it_only_waits_costs_nothing(tmp_path: Path) -> None:
    """A restore may take hours, and need the memory."""
    stage = Stage(tmp_path)
    stage.keeper.load()
    await stage.until((tmp_path / "loaded").exists)
    await stage.until(lambda: stage.keeper._process is not None)
    waiting = stage.keeper._process
    assert waiting is not None
    waiting.kill()
    await stage.until(lambda: stage.keeper._process is None)
    with capture_logs() as logs:
        await stage.keeper.start()
    assert stage.pid() not in (None, waiting.pid)
    await stage.keeper.end()
    assert logs == []


async def test_an_agent_that_has_only_loaded_ends_at_once(tmp_path: Path) -> None:
    """It does not hear SIGTERM yet."""
    stage = Stage(tmp_path)
    stage.keeper.load()
    await stage.until((tmp_path / "loaded").exists)
    async with asyncio.timeout(HANG_SECONDS):
        await stage.keeper.end()
    assert stage.pid() is None


async def test_an_agent_that_cannot_start_is_an_error(tmp_path: Path) -> None:
    stage = Stage(tmp_path / "absent")
    with pytest.raises(KeepstepError, match="with code 1"):
        await stage.keeper.start()


async def test_an_agent_that_does_not_answer_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_supervisor, "_SAY_AFTER_SECONDS", 0.1)
    polls = 0

    def answers_late() -> bool:
        nonlocal polls
        polls += 1
        return polls > 10

    keeper = AgentSupervisor(
        (sys.executable, "-c", AGENT, str(tmp_path)),
        environment=os.environ,
        grace_seconds=GRACE_SECONDS,
        notify=lambda request: None,
        answers=answers_late,
    )
    with capture_logs() as logs:
        await keeper.start()
    await keeper.end()
    assert [line["event"] for line in logs] == ["run.agent_not_answering"]


async def test_an_agent_whose_answer_is_seen_after_its_end_was_told(tmp_path: Path) -> None:
    def leave_and_answer(_: agent_pb2.NotifyTerminationRequest) -> None:
        pid = stage.pid()
        stage.leave(0)
        deadline = time.monotonic() + HANG_SECONDS
        while Path(f"/proc/{pid}").exists():
            assert time.monotonic() < deadline, "it does not leave"
            time.sleep(0.01)
        # Its end is known by now, or will be as soon as the loop has a turn.
        seen.set()
        may_answer.wait(HANG_SECONDS)

    seen, may_answer = threading.Event(), threading.Event()
    stage = Stage(tmp_path, notify=leave_and_answer)
    with capture_logs() as logs:
        await stage.keeper.start()
        draining = asyncio.create_task(stage.keeper.drain(failed_at=0.0))
        await stage.until(seen.is_set)
        await stage.until(lambda: stage.keeper._process is None or stage.keeper._process.returncode is not None)
        may_answer.set()
        assert await draining == 0
    assert logs == []


async def test_a_drain_ends_with_the_orderly_end_of_an_agent_that_was_told(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        draining = asyncio.create_task(stage.keeper.drain(failed_at=0.0))
        await stage.until(lambda: bool(stage.told))
        await stage.die()
        # The wish that it leaves died with the first.
        await stage.until(lambda: len(stage.told) == 2)
        assert not draining.done()
        stage.leave(0)
        assert await asyncio.wait_for(draining, HANG_SECONDS) == 0
        assert stage.told == [(0.0, "program ended", True, 0.0)] * 2


async def test_an_orderly_end_before_the_program_ended_is_not_the_end(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        first = stage.pid()
        stage.leave(0)
        (tmp_path / "pid").unlink()
        await stage.until(lambda: not Path(f"/proc/{first}").exists())
        (tmp_path / "leave").unlink()
        draining = asyncio.create_task(stage.keeper.drain(failed_at=0.0))
        await stage.until(lambda: bool(stage.told))
        assert stage.pid() != first
        stage.leave(75)
        assert await asyncio.wait_for(draining, HANG_SECONDS) == 75


async def test_a_notice_keeps_its_deadline_while_nobody_listens(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        stage.deaf = True
        stage.keeper.notice("runner SIGTERM")
        await stage.die()
        assert not stage.told
        stage.deaf = False
        await stage.until(lambda: bool(stage.told))
        ((grace_seconds, source, trainers_gone, _),) = stage.told
        assert (source, trainers_gone) == ("runner SIGTERM", False)
        assert GRACE_SECONDS - 2 * HANG_SECONDS <= grace_seconds < GRACE_SECONDS


async def test_an_agent_that_does_not_listen_at_the_end_is_terminated(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        stage.deaf = True
        draining = asyncio.create_task(stage.keeper.drain(failed_at=0.0))
        assert await asyncio.wait_for(draining, HANG_SECONDS) == 0


@pytest.mark.parametrize("told_before", [False, True])
async def test_an_agent_that_hangs_while_draining_is_replaced_by_one_that_drains(
    tmp_path: Path, told_before: bool
) -> None:
    async with serving(tmp_path, grace_seconds=0.5) as stage:
        first = stage.pid()
        if not told_before:
            await stage.stop()
        # Nor does a notice that it does not hear stand in the way.
        stage.keeper.notice("runner SIGTERM")
        draining = asyncio.create_task(stage.keeper.drain(failed_at=0.0))
        if told_before:
            await stage.until(lambda: len(stage.told) == 2)
            await stage.stop()
        await stage.until(lambda: stage.told.count((0.0, "program ended", True, 0.0)) == 1 + told_before)
        assert stage.pid() != first
        stage.leave(75)
        assert await asyncio.wait_for(draining, HANG_SECONDS) == 75


def test_pauses_grow_with_deaths_in_a_row_and_a_healthy_minute_begins_a_new_row() -> None:
    deaths = RestartBackoff()
    assert [deaths.add(1.0) for _ in range(8)] == [0.5, 1, 2, 4, 8, 16, 30, 30]
    assert deaths.add(61.0) == 0.5
    assert deaths.count == 1

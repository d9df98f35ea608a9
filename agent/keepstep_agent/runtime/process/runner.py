"""Runs a program and its agent together, without Kubernetes: `keepstep run`.

Restores first, while the agent's process loads its libraries, then runs the program beside its agent, passes signals
on, and waits for the drain. Signals are handled from the first moment: before the program runs they end the run; while
it runs they go to the program; after its end those that mean an end limit the drain to one grace period. The agent has
its own session, so that Ctrl-C in a terminal reaches only the program. If this runner is killed, the agent notices it
and asks the trainers to save and leave.
"""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import structlog

from keepstep_agent.adapters.durable_files import opened
from keepstep_agent.adapters.liveness import RankLocks
from keepstep_agent.adapters.volume.shared_folders import open_state_directory
from keepstep_agent.core.errors import ErrorKind, KeepstepError
from keepstep_agent.core.limits import RECORD_BYTES
from keepstep_agent.core.policies.run_exit import Drained, run_exit_code
from keepstep_agent.core.settings.values import Settings
from keepstep_agent.runtime.process.agent_supervisor import AgentSupervisor, Notify, exit_code, send_signal
from keepstep_agent.runtime.process.autoload_check import AutoloadCheck
from keepstep_agent.runtime.process.descendants import Descendants, adopt_orphans, reap_orphans
from keepstep_api.names import ENV_RESUME, JUST_IN_TIME_EXIT_CODE, NOT_DURABLE_EXIT_CODE, RESUMED

_RESTORE_END_SECONDS: Final = 10.0
_BETWEEN_QUESTIONS_SECONDS: Final = 2.0
_LAUNCHER_MARGIN_SECONDS: Final = 2.0
_DRAIN_SECONDS: Final = 1.0
"""For the upload of what the processes that the program has left behind have saved."""
_AT_ONCE_SECONDS: Final = 0.2
"""Between the signals of somebody who tells all processes of a job."""
_ORDERLY: Final = frozenset({0, JUST_IN_TIME_EXIT_CODE, NOT_DURABLE_EXIT_CODE})
"""Exit codes of processes that no error has ended."""
_EARLY_SECONDS: Final = 60.0
"""A program that fails within so long may not have been able to load what it resumes from."""
_FATAL: Final = frozenset({signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV})
"""The kernel sends these for an error of the program's own."""
_NOTICES: Final = frozenset({signal.SIGTERM, signal.SIGHUP})
"""The machine is going away; the agent is told at once."""
_TYPED: Final = frozenset({signal.SIGINT, signal.SIGQUIT})
"""Mostly from a keyboard; the program may go on."""
_PROGRAMS_OWN: Final = frozenset({signal.SIGUSR1, signal.SIGUSR2})
"""The program gives them their meaning (`sbatch --signal=USR1@90`); without a handler it dies of them."""
# -P: nothing is imported from the working directory, where the program may have a module of any name.
_KEEPSTEP: Final = (sys.executable, "-P", "-m", "keepstep_agent")

log = structlog.get_logger("keepstep.run")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Resumed:
    """What the last restore that found a checkpoint has put in place; `written` tells one restore from another."""

    path: str = ""
    written: tuple[int, ...] = ()


class Runner:
    """One run; make it inside the event loop that runs it.

    `environment` carries the settings to the children; `notify`, `answers` and `is_stuck` talk to the agent. With
    `take_over` a run that is alive at the destination does not keep this one out. With `autoload_check` the run warns
    where autoload is not active.
    """

    def __init__(
        self,
        settings: Settings,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        notify: Notify,
        answers: Callable[[], bool],
        is_stuck: Callable[[], bool],
        take_over: bool = False,
        autoload_check: AutoloadCheck | None = None,
    ) -> None:
        self._settings = settings
        self._command = command
        self._environment = dict(environment)
        self._agent = AgentSupervisor(
            (*_KEEPSTEP, "agent"),
            environment=self._environment,
            grace_seconds=settings.termination.grace_seconds,
            notify=notify,
            answers=answers,
        )
        self._program: asyncio.subprocess.Process | None = None
        self._is_stuck = is_stuck
        self._take_over = take_over
        self._autoload_check = autoload_check
        self._ended_stuck = self._is_signalled = False
        self._began_at = 0.0
        loop = asyncio.get_running_loop()
        self._noticed: asyncio.Future[float] = loop.create_future()
        """When the first notice came, in the event loop's time."""
        self._at_notice: Descendants | None = None
        self._hurried: asyncio.Future[None] = loop.create_future()
        self._is_draining = False
        self._interrupted: asyncio.Future[signal.Signals] = loop.create_future()

    async def run(self) -> int:
        """Return the exit code, as `run_exit_code` derives it.

        If the restore fails or a signal comes before the program runs, the exit code says that instead.
        """
        self._listen()
        self._agent.load()
        before = await asyncio.to_thread(self._resumed)
        code = await self._restore()
        if code:
            await self._agent.end()
            return code
        after = await asyncio.to_thread(self._resumed)
        resume = {ENV_RESUME: after.path} if after != before else {}
        if not await self._start_agent():
            return _interrupted_code(self._interrupted.result())
        code = await self._run_program(resume)
        assert self._program is not None
        # Before anything else, because files are judged by their age at that time.
        ended_at = time.time()
        if self._program.returncode:
            # Who tells all processes of a job at once may have told the program first.
            await asyncio.wait({self._noticed}, timeout=_AT_ONCE_SECONDS)
        survivors = await self._codes_of_left_behind()
        self._is_draining = True
        if not _ORDERLY.issuperset(survivors):
            ended_at = time.time()
        has_failed = not _ORDERLY.issuperset((self._program.returncode, *survivors))
        is_own_error = (self._program.returncode or 0) > 0 or -(self._program.returncode or 0) in _FATAL
        is_early = ended_at - self._began_at <= _EARLY_SECONDS
        drained = await self._agent.drain(
            failed_at=ended_at if has_failed else 0.0,
            failed_early=has_failed and is_own_error and is_early and not self._is_signalled,
            survivors_ended_well=bool(survivors) and _ORDERLY.issuperset(survivors),
        )
        if drained in (Drained.NOT_STORED, Drained.STOPPED_NOT_STORED):
            log.error("run.not_durable", program_code=code)
        return run_exit_code(
            program_code=code,
            drained=drained,
            noticed=self._noticed.done(),
            stuck_code=self._settings.progress.stuck_exit_code if self._ended_stuck else 0,
        )

    async def _codes_of_left_behind(self) -> Sequence[int]:
        """Return the exit codes of processes that the program has left behind, which may save in the grace period.

        None are waited for without a notice: a program that ends by itself may leave servers behind.
        """
        if self._at_notice is None:
            return ()
        termination = self._settings.termination
        until = self._noticed.result() + termination.grace_seconds - termination.commit_reserve_seconds - _DRAIN_SECONDS
        ending = asyncio.create_task(self._at_notice.ended(until - asyncio.get_running_loop().time()))
        either: set[asyncio.Future[Any]] = {ending, self._hurried}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not ending.done():
            ending.cancel()
            return ()
        return ending.result() or ()

    def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        for number in _NOTICES | _TYPED | _PROGRAMS_OWN:
            # A signal that our parent has set to ignored, as nohup does, stays ignored for the program too.
            if signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, self._take, number)

    def _take(self, number: signal.Signals) -> None:
        """Act on a signal to this run, and log it last: the log's reader may be gone."""
        self._is_signalled = True
        if self._program is None:
            if not self._interrupted.done():
                self._interrupted.set_result(number)
        elif not self._is_draining:
            if self._program.returncode is not None and number in _TYPED and not self._hurried.done():
                # Somebody does not want to wait any longer for what the program has left behind.
                self._hurried.set_result(None)
            if number not in _TYPED or not _hears_the_terminal(self._program.pid):
                send_signal(self._program, number)
            if number in _NOTICES:
                if not self._noticed.done():
                    self._noticed.set_result(asyncio.get_running_loop().time())
                    self._at_notice = Descendants(besides=self._agent.pid)
                self._agent.notice(f"runner {number.name}")
        elif number not in _PROGRAMS_OWN:
            # The program has ended; limit the agent's drain.
            self._agent.notice(f"runner {number.name}")
        log.info("run.signal", signal=number.name)

    async def _restore(self) -> int:
        command = [*_KEEPSTEP, "restore", "--lease", "take-over" if self._take_over else "acquire"]
        # Only the program may write to stdout: somebody may read it.
        process = await asyncio.create_subprocess_exec(*command, stdout=sys.stderr, env=self._environment)
        ended = asyncio.create_task(process.wait())
        if not await self._interrupted_before(ended):
            return exit_code(ended.result())
        number = self._interrupted.result()
        if process.returncode is None:
            send_signal(process, number)
            await asyncio.wait({ended}, timeout=_RESTORE_END_SECONDS)
        send_signal(process, signal.SIGKILL)
        await ended
        return _interrupted_code(number)

    async def _start_agent(self) -> bool:
        """Start the agent; return False if a signal ended the run first. Raises KeepstepError."""
        if self._interrupted.done():
            await self._agent.end()
            return False
        starting = asyncio.create_task(self._agent.start())
        if await self._interrupted_before(starting):
            await self._agent.end()
            await asyncio.gather(starting, return_exceptions=True)
            return False
        await starting
        return True

    async def _interrupted_before(self, task: asyncio.Task[Any]) -> bool:
        """Wait for the task's end or a signal, whichever comes first. Returns whether a signal has come."""
        either: set[asyncio.Future[Any]] = {task, self._interrupted}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        return self._interrupted.done()

    def _resumed(self) -> "_Resumed":
        """Return what restores of this volume have put in place until now. Blocks."""
        try:
            with open_state_directory(Path(self._settings.volume), Path(self._settings.state_directory)) as folder:
                status = folder.status(RESUMED)
                record = json.loads(folder.read(RESUMED, RECORD_BYTES))
            directory = Path(self._settings.volume, record.get("directory") or self._settings.checkpoint_directory)
            path = directory / record["name"]
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            return _Resumed()
        return _Resumed(path=str(path), written=(status.st_ino, status.st_mtime_ns))

    async def _run_program(self, variables: Mapping[str, str]) -> int:
        environment = {**self._environment, **variables}
        if self._autoload_check:
            try:
                await asyncio.to_thread(self._autoload_check.begin)
            except OSError as error:
                log.info("run.autoload_not_checked", error=str(error))
                self._autoload_check = None
        # A launcher that dies leaves its ranks to this process, which waits for them.
        adopt_orphans()
        self._began_at = time.time()
        try:
            self._program = await asyncio.create_subprocess_exec(*self._command, env=environment)
        except OSError as error:
            await self._agent.end()
            raise _starting_error(error, self._command[0], self._environment.get("PATH")) from error
        if self._interrupted.done():
            # The signal came while the program was being started.
            self._take(self._interrupted.result())
        watching = [
            asyncio.create_task(self._end_when_stuck(self._program), name="end when stuck"),
            asyncio.create_task(reap_orphans(), name="reap orphans"),
        ]
        if self._autoload_check:
            checking = self._warn_where_not_active(self._program, self._autoload_check)
            watching.append(asyncio.create_task(checking, name="check autoload"))
        returned = await self._program.wait()
        for task in watching:
            task.cancel()
        if self._ended_stuck:
            await asyncio.to_thread(self._kill_ranks)
        if -returned in _PROGRAMS_OWN:
            log.error(
                "run.program_has_no_handler",
                signal=signal.Signals(-returned).name,
                hint="the program died of it and did not save; if `sbatch --signal` sent it, let that send TERM",
            )
        return exit_code(returned)

    async def _end_when_stuck(self, program: asyncio.subprocess.Process) -> None:
        """End the program when the agent says that it is stuck, if the settings want that."""
        if not self._settings.progress.stuck_exit_code:
            return
        while not await asyncio.to_thread(self._is_stuck):  # noqa: ASYNC110 - another process knows
            await asyncio.sleep(_BETWEEN_QUESTIONS_SECONDS)
        self._ended_stuck = self._is_signalled = True
        seconds = self._settings.termination.grace_seconds
        log.error(
            "run.stuck",
            grace_seconds=seconds,
            exit_code=self._settings.progress.stuck_exit_code,
            hint="the program is ended, because it makes no steps",
        )
        send_signal(program, signal.SIGTERM)
        # A launcher gives its ranks as long, and should end them itself.
        await asyncio.sleep(seconds + _LAUNCHER_MARGIN_SECONDS)
        send_signal(program, signal.SIGKILL)

    async def _warn_where_not_active(self, program: asyncio.subprocess.Process, check: AutoloadCheck) -> None:
        """Warn, once, when a process of the program has imported torch and autoload is not active in it."""
        try:
            while (process := await asyncio.to_thread(check.look, program.pid)) is None:  # noqa: ASYNC110 - as above
                await asyncio.sleep(_BETWEEN_QUESTIONS_SECONDS)
        except OSError as error:
            log.info("run.autoload_not_checked", error=str(error))
            return
        log.warning(
            "run.autoload_not_active",
            pid=process.pid,
            command=process.command,
            problem=process.problem,
            hint=process.hint,
        )

    def _kill_ranks(self) -> None:
        """Kill the stuck ranks that the program has left behind: they do not hear SIGTERM. Blocks."""
        for process_id in RankLocks(Path(self._settings.volume)).holders():
            log.warning("run.rank_killed", pid=process_id)
            with contextlib.suppress(OSError):
                os.kill(process_id, signal.SIGKILL)


def _interrupted_code(number: signal.Signals) -> int:
    """Return the exit code of a run that a signal ended before its program began: nothing is lost."""
    return JUST_IN_TIME_EXIT_CODE if number in _NOTICES else exit_code(-number)


def _starting_error(error: OSError, program: str, search_path: str | None) -> KeepstepError:
    """Say why a program did not start. With an unreadable folder in PATH, every name gives "Permission denied"."""
    reason = error.strerror
    hint = "give the program after --, as in: keepstep run --to DEST -- python train.py"
    if os.sep not in program and shutil.which(program, os.F_OK, search_path) is None:
        reason = "not found in any folder of PATH"
        hint = f"{hint}; a program in the working directory needs ./ before its name"
    return KeepstepError(ErrorKind.BAD_CONFIGURATION, f"cannot start {program!r}: {reason}", hint=hint)


def _hears_the_terminal(pid: int) -> bool:
    """Whether the terminal sends a typed Ctrl-C or Ctrl-\\ to both that process and us."""
    try:
        with opened(Path("/dev/tty"), os.O_RDONLY | os.O_NOCTTY) as terminal:
            return os.tcgetpgrp(terminal) == os.getpgrp() == os.getpgid(pid)
    except OSError:
        return False

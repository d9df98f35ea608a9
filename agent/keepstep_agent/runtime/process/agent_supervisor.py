"""Supervises the agent process of a run: starts it, restarts it when it dies, and ends it in order.

An agent's process loads its libraries at once, and begins to work when it gets a byte on its standard input. Without
one it ends with its standard input.
"""

import asyncio
import contextlib
import os
import signal
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import structlog

from keepstep_agent.core.errors import ErrorKind, KeepstepError
from keepstep_agent.core.policies.run_exit import Drained
from keepstep_api.v1 import agent_pb2


def exit_code(returncode: int) -> int:
    """Return the exit code as a shell reports it: 128 + n for a process that signal n killed."""
    return returncode if returncode >= 0 else 128 - returncode


def send_signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    """Send a signal to a process that this one has started, if it has not ended.

    Of one that has just ended, Process.send_signal would take the exit code, and asyncio would report 255.
    """
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)


# The agent replays its journal before it first answers. Only one that hangs takes this long.
_ANSWER_SECONDS: Final = 600.0
# After this long without a log line, `keepstep run` looks as if it hangs.
_SAY_AFTER_SECONDS: Final = 5.0
_POLL_SECONDS: Final = 0.05
_HEALTHY_SECONDS: Final = 60.0
_SHORTEST_PAUSE_SECONDS: Final = 0.5
_LONGEST_PAUSE_SECONDS: Final = 30.0
_DEATHS_WHILE_DRAINING: Final = 7
_DELIVERY_TRIES: Final = 3
_DELIVERY_PAUSE_SECONDS: Final = 0.5
_LISTEN_SECONDS: Final = 1.0
_LEAST_GRACE_SECONDS: Final = 0.1
_END_MARGIN_SECONDS: Final = 5.0
_ORDERLY: Final = frozenset(Drained)
_NEVER_BORN: Final = 71
"""EX_OSERR: the process could not even be forked."""

Notify = Callable[[agent_pb2.NotifyTerminationRequest], None]
"""Tells the agent that the run is ending. Blocks; raises KeepstepError."""

log = structlog.get_logger("keepstep.run")


class RestartBackoff:
    """Counts the agent's deaths in a row and says how long to wait before the next start."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, lived_seconds: float) -> float:
        """Count one death and return the pause in seconds. After a healthy life the count restarts at one."""
        self.count = 1 if lived_seconds >= _HEALTHY_SECONDS else self.count + 1
        doubled = _SHORTEST_PAUSE_SECONDS * (1 << min(self.count - 1, 10))
        return min(doubled, _LONGEST_PAUSE_SECONDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Message:
    """A message that the agent has not received yet; `deadline` is in the event loop's time."""

    source: str
    deadline: float
    trainers_gone: bool = False
    trainers_failed_at: float = 0.0
    trainers_failed_early: bool = False
    survivors_ended_well: bool = False


class AgentSupervisor:
    """Keeps one agent running. `command` starts an agent; `notify` and `answers` talk to the running one."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        grace_seconds: float,
        notify: Notify,
        answers: Callable[[], bool],
    ) -> None:
        self._command = command
        self._environment = environment
        self._grace_seconds = grace_seconds
        self._notify = notify
        self._answers = answers
        self._process: asyncio.subprocess.Process | None = None
        self._keeping: asyncio.Task[int] | None = None
        self._may_begin = asyncio.Event()
        self._served = asyncio.Event()
        self._draining = asyncio.Event()
        self._ending = False
        self._failed_at, self._failed_early, self._survivors_ended_well = 0.0, False, False
        self._undelivered: deque[_Message] = deque()
        self._news = asyncio.Event()
        self._delivering = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        """Process id of the agent that runs."""
        return None if self._process is None else self._process.pid

    def load(self) -> None:
        """Start the agent's process, so that it has loaded its libraries when `start` is called."""
        self._keeping = asyncio.create_task(self._keep(), name="keep agent")

    async def start(self) -> None:
        """Let the agent work; return when it answers, or after `end`. Raises KeepstepError if it does not start."""
        if self._keeping is None:
            self.load()
        assert self._keeping is not None
        self._may_begin.set()
        served = asyncio.create_task(self._served.wait())
        await asyncio.wait({self._keeping, served}, return_when=asyncio.FIRST_COMPLETED)
        served.cancel()
        if self._keeping.done():
            self._keeping.result()

    def notice(self, source: str) -> None:
        """Tell the agent that the machine is going away: at once, or as soon as an agent runs again."""
        self._enqueue(_Message(source=source, deadline=asyncio.get_running_loop().time() + self._grace_seconds))

    async def drain(
        self, *, failed_at: float, failed_early: bool = False, survivors_ended_well: bool = False
    ) -> Drained:
        """Wait, after the program's end, until an agent has made durable what it can.

        `failed_at`: when the program ended, in unix seconds, if a signal or an error ended it; else 0. `failed_early`:
        an error of its own did, soon after its start. And whether processes that outlived it then have ended well.
        Returns what the last agent said.
        """
        assert self._keeping is not None
        self._failed_at, self._survivors_ended_well = failed_at, survivors_ended_well
        self._failed_early = failed_early
        self._draining.set()
        self._say_program_ended()
        try:
            code = await asyncio.shield(self._keeping)
        except Exception:
            # A failure of the supervisor must not hide the program's own exit code.
            log.exception("run.keeping_failed")
            return Drained.NOT_STORED
        return Drained(code) if code in _ORDERLY else Drained.NOT_STORED

    async def end(self) -> None:
        """End the agent when no program runs: SIGTERM, then SIGKILL after the grace period and a margin."""
        assert self._keeping is not None
        self._ending = True
        self._draining.set()
        self._terminate()
        await asyncio.wait({self._keeping}, timeout=self._grace_seconds + _END_MARGIN_SECONDS)
        if self._process is not None:
            send_signal(self._process, signal.SIGKILL)
        await asyncio.gather(self._keeping, return_exceptions=True)

    async def _keep(self) -> int:
        """Run one agent after the other; return the exit code of the last."""
        loop = asyncio.get_running_loop()
        deaths = RestartBackoff()
        arguments = ["--fresh"]
        while True:
            was_draining, began = self._draining.is_set(), loop.time()
            code = await self._live(arguments)
            arguments = []
            if not self._ending and not self._may_begin.is_set():
                # It has only waited, and perhaps was in the way of a restore that needs the memory.
                await _first_of(self._may_begin, self._draining)
                arguments = ["--fresh"]
                continue
            if self._ending or (code in _ORDERLY and self._draining.is_set() and not self._undelivered):
                return code
            if not self._served.is_set():
                raise KeepstepError(
                    ErrorKind.BAD_CONFIGURATION,
                    f"the agent exited at its start with code {code}",
                    hint="see its log lines above",
                )
            if self._draining.is_set() and not was_draining:
                deaths = RestartBackoff()
            # While draining, every death counts, however long the agent lived: nobody would notice endless restarts.
            pause_seconds = deaths.add(0.0 if was_draining else loop.time() - began)
            log.warning("run.agent_died", code=code, restart=deaths.count, pause_seconds=pause_seconds)
            if self._draining.is_set() and deaths.count >= _DEATHS_WHILE_DRAINING:
                log.error("run.agent_given_up", deaths=deaths.count)
                return code or Drained.NOT_STORED
            await self._pause(pause_seconds)
            if self._draining.is_set():
                self._say_program_ended()

    async def _pause(self, seconds: float) -> None:
        if self._draining.is_set():
            await asyncio.sleep(seconds)
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._draining.wait()

    async def _live(self, arguments: Sequence[str]) -> int:
        """Run one agent process; return its exit code."""
        command = [*self._command, "--parent-pid", str(os.getpid()), "--begin-when-told", *arguments]
        try:
            process = await asyncio.create_subprocess_exec(
                *command, env=self._environment, stdin=asyncio.subprocess.PIPE, start_new_session=True
            )
        except OSError as error:
            log.error("run.agent_not_started", error=str(error))
            return _NEVER_BORN
        self._process = process
        if self._ending:
            self._terminate()
        talking = asyncio.create_task(self._talk(process), name="talk to agent")
        try:
            code = exit_code(await process.wait())
            async with self._delivering:
                # The agent may have left because of a call that is still open: wait, so that its answer counts.
                return code
        finally:
            self._process = None
            talking.cancel()
            await asyncio.gather(talking, return_exceptions=True)

    async def _talk(self, process: asyncio.subprocess.Process) -> None:
        """Wait until the agent answers, then deliver messages for as long as it lives. Kills an agent that hangs."""
        await self._may_begin.wait()
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.close()
        loop = asyncio.get_running_loop()
        began = loop.time()
        has_said = False
        while not await asyncio.to_thread(self._answers):
            silent_seconds = loop.time() - began
            if silent_seconds >= _ANSWER_SECONDS:
                log.error("run.agent_silent", seconds=_ANSWER_SECONDS)
                send_signal(process, signal.SIGKILL)
                return
            if silent_seconds >= _SAY_AFTER_SECONDS and not has_said:
                has_said = True
                log.warning("run.agent_not_answering", seconds=round(silent_seconds), patience_seconds=_ANSWER_SECONDS)
            await asyncio.sleep(_POLL_SECONDS)
        self._served.set()
        failures = 0
        silent_since: float | None = None
        while True:
            await self._wait_for_news()
            message = self._undelivered[0] if self._undelivered else None
            if await (self._deliver(message) if message else asyncio.to_thread(self._answers)):
                failures, silent_since = 0, None
                continue
            now = loop.time()
            silent_since = silent_since or now
            failures += 1 if message else 0
            ending = next((message for message in self._undelivered if message.trainers_gone), None)
            if ending and failures >= _DELIVERY_TRIES:
                # The agent lives but does not answer calls. SIGTERM reaches it; its grace period begins here.
                failures, silent_since = 0, now
                self._terminate()
                self._mark_delivered(ending)
            silent_seconds = now - silent_since
            if self._draining.is_set() and silent_seconds >= self._grace_seconds + _END_MARGIN_SECONDS:
                log.error("run.agent_hangs", seconds=round(silent_seconds))
                send_signal(process, signal.SIGKILL)
                return
            await asyncio.sleep(_DELIVERY_PAUSE_SECONDS)

    async def _wait_for_news(self) -> None:
        """Wait for a message. While draining, wait only briefly: the caller alone notices that the agent hangs."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LISTEN_SECONDS if self._draining.is_set() else None):
                await self._news.wait()

    async def _deliver(self, message: _Message) -> bool:
        left_seconds = message.deadline - asyncio.get_running_loop().time()
        async with self._delivering:
            try:
                await asyncio.to_thread(
                    self._notify,
                    agent_pb2.NotifyTerminationRequest(
                        # To the agent, 0 means the configured grace period.
                        grace_seconds=0.0 if message.trainers_gone else max(left_seconds, _LEAST_GRACE_SECONDS),
                        source=message.source,
                        trainers_gone=message.trainers_gone,
                        trainers_failed_at=message.trainers_failed_at,
                        trainers_failed_early=message.trainers_failed_early,
                        survivors_ended_well=message.survivors_ended_well,
                    ),
                )
            except KeepstepError as error:
                log.warning("run.agent_unreachable", error=str(error))
                return False
            self._mark_delivered(message)
        return True

    def _say_program_ended(self) -> None:
        """Tell each new agent that the program has ended. Unlike a notice, this is not in the agent's journal."""
        if not any(message.trainers_gone for message in self._undelivered):
            self._enqueue(
                _Message(
                    source="program ended",
                    deadline=0.0,
                    trainers_gone=True,
                    trainers_failed_at=self._failed_at,
                    trainers_failed_early=self._failed_early,
                    survivors_ended_well=self._survivors_ended_well,
                )
            )

    def _enqueue(self, message: _Message) -> None:
        self._undelivered.append(message)
        self._news.set()

    def _mark_delivered(self, message: _Message) -> None:
        self._undelivered.remove(message)
        if not self._undelivered:
            self._news.clear()

    def _terminate(self) -> None:
        if self._process is not None:
            # One that may not begin does not hear SIGTERM yet, and has nothing to lose.
            send_signal(self._process, signal.SIGTERM if self._may_begin.is_set() else signal.SIGKILL)


async def _first_of(*events: asyncio.Event) -> None:
    """Wait until one of the events is set."""
    waiting = {asyncio.create_task(event.wait()) for event in events}
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

"""The agent process of a run: starts it, restarts it, and ends it in order."""

import asyncio
import contextlib
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import structlog

from mooring_agent.core.agent.drain import EXIT_NOT_DURABLE
from mooring_agent.core.errors import ErrorKind, MooringError


def exit_code(returncode: int) -> int:
    """As a shell gives it: 128 + n for a process that died of signal n."""
    return returncode if returncode >= 0 else 128 - returncode


# A long journal is replayed before the first answer. Only an agent that hangs takes this long.
_ANSWER_SECONDS: Final = 600.0
# Silence of a program that was started long ago looks like a hang.
_SAY_AFTER_SECONDS: Final = 5.0
_POLL_SECONDS: Final = 0.05
_HEALTHY_SECONDS: Final = 60.0
_SHORTEST_PAUSE_SECONDS: Final = 0.5
_LONGEST_PAUSE_SECONDS: Final = 30.0
_DEATHS_WHILE_DRAINING: Final = 7
_TELL_TRIES: Final = 3
_TELL_PAUSE_SECONDS: Final = 0.5
_LISTEN_SECONDS: Final = 1.0
_LEAST_GRACE_SECONDS: Final = 0.1
_END_MARGIN_SECONDS: Final = 5.0
_ORDERLY: Final = frozenset({0, EXIT_NOT_DURABLE})
_NEVER_BORN: Final = 71
"""EX_OSERR: the process could not even be forked."""

Notify = Callable[[float, str, bool], None]
"""(grace seconds, source, trainers gone): tell the agent of the end; blocks, raises MooringError."""

log = structlog.get_logger("mooring.run")


class RestartBackoff:
    """How often the agent died in a row, and how long to wait before the next start."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, lived_seconds: float) -> float:
        """Counts one and returns the pause in seconds. An agent that lived for a healthy minute begins a new row."""
        self.count = 1 if lived_seconds >= _HEALTHY_SECONDS else self.count + 1
        doubled = _SHORTEST_PAUSE_SECONDS * (1 << min(self.count - 1, 10))
        return min(doubled, _LONGEST_PAUSE_SECONDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Message:
    """What an agent has yet to be told; `deadline` in the loop's time."""

    source: str
    deadline: float
    trainers_gone: bool = False


class AgentSupervisor:
    """`command` starts an agent; `notify` and `answers` talk to the one that runs."""

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
        self._served = asyncio.Event()
        self._draining = asyncio.Event()
        self._ending = False
        self._untold: deque[_Message] = deque()
        self._news = asyncio.Event()
        self._telling = asyncio.Lock()

    async def start(self) -> None:
        """Returns when the agent answers, or after `end`. Raises MooringError when it does not start."""
        self._keeping = asyncio.create_task(self._keep(), name="keep agent")
        served = asyncio.create_task(self._served.wait())
        await asyncio.wait({self._keeping, served}, return_when=asyncio.FIRST_COMPLETED)
        served.cancel()
        if self._keeping.done():
            self._keeping.result()

    def notice(self, source: str) -> None:
        """The machine is going away: the agent hears it now, or as soon as there is one again."""
        self._say(_Message(source=source, deadline=asyncio.get_running_loop().time() + self._grace_seconds))

    async def drain(self) -> int:
        """The program has ended: wait until an agent made durable what it can. 0, or 75 when something is not."""
        assert self._keeping is not None
        self._draining.set()
        self._say_program_ended()
        try:
            code = await asyncio.shield(self._keeping)
        except Exception:
            # Ours, whatever it is; the program's own exit code must still come out.
            log.exception("run.keeping_failed")
            return EXIT_NOT_DURABLE
        return 0 if code == 0 else EXIT_NOT_DURABLE

    async def end(self) -> None:
        """There is no program: the agent gets its grace period, no more."""
        assert self._keeping is not None
        self._ending = True
        self._draining.set()
        self._terminate()
        await asyncio.wait({self._keeping}, timeout=self._grace_seconds + _END_MARGIN_SECONDS)
        if self._process is not None:
            self._process.kill()
        await asyncio.wait({self._keeping})

    async def _keep(self) -> int:
        """One agent after the other; the exit code of the last."""
        loop = asyncio.get_running_loop()
        deaths = RestartBackoff()
        arguments = ["--fresh"]
        while True:
            was_draining, began = self._draining.is_set(), loop.time()
            code = await self._live(arguments)
            arguments = []
            if self._ending or (code in _ORDERLY and self._draining.is_set() and not self._untold):
                return code
            if not self._served.is_set():
                raise MooringError(
                    ErrorKind.BAD_CONFIGURATION,
                    f"the agent ended at its start with code {code}",
                    hint="its own lines above say why",
                )
            if self._draining.is_set() and not was_draining:
                deaths = RestartBackoff()
            # What counts while draining is all the deaths: nobody would notice that it goes on like this for ever.
            pause_seconds = deaths.add(0.0 if was_draining else loop.time() - began)
            log.warning("run.agent_died", code=code, restart=deaths.count, pause_seconds=pause_seconds)
            if self._draining.is_set() and deaths.count >= _DEATHS_WHILE_DRAINING:
                log.error("run.agent_given_up", deaths=deaths.count)
                return code or EXIT_NOT_DURABLE
            await self._pause(pause_seconds)
            if self._draining.is_set():
                self._say_program_ended()

    async def _pause(self, seconds: float) -> None:
        if self._draining.is_set():
            await asyncio.sleep(seconds)
            return
        try:
            async with asyncio.timeout(seconds):
                await self._draining.wait()
        except TimeoutError:
            return

    async def _live(self, arguments: Sequence[str]) -> int:
        """One life of the agent; its exit code."""
        command = [*self._command, "--parent-pid", str(os.getpid()), *arguments]
        try:
            process = await asyncio.create_subprocess_exec(*command, env=self._environment, start_new_session=True)
        except OSError as error:
            log.error("run.agent_not_started", error=str(error))
            return _NEVER_BORN
        self._process = process
        if self._ending:
            self._terminate()
        talking = asyncio.create_task(self._talk(process), name="talk to agent")
        try:
            code = exit_code(await process.wait())
            async with self._telling:
                # What it was told just now, it may have left for: its answer counts, also when we see it after its end.
                return code
        finally:
            self._process = None
            talking.cancel()
            await asyncio.gather(talking, return_exceptions=True)

    async def _talk(self, process: asyncio.subprocess.Process) -> None:
        """Wait until it answers, then tell it what there is to tell, for as long as it lives."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        has_said = False
        while not await asyncio.to_thread(self._answers):
            silent_seconds = loop.time() - began
            if silent_seconds >= _ANSWER_SECONDS:
                log.error("run.agent_silent", seconds=_ANSWER_SECONDS)
                process.kill()
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
            message = self._untold[0] if self._untold else None
            if await (self._tell(message) if message else asyncio.to_thread(self._answers)):
                failures, silent_since = 0, None
                continue
            now = loop.time()
            silent_since = silent_since or now
            failures += 1 if message else 0
            ending = next((message for message in self._untold if message.trainers_gone), None)
            if ending and failures >= _TELL_TRIES:
                # It lives and does not listen: this, it hears, and has its grace from now on.
                failures, silent_since = 0, now
                self._terminate()
                self._told(ending)
            silent_seconds = now - silent_since
            if self._draining.is_set() and silent_seconds >= self._grace_seconds + _END_MARGIN_SECONDS:
                log.error("run.agent_hangs", seconds=round(silent_seconds))
                process.kill()
                return
            await asyncio.sleep(_TELL_PAUSE_SECONDS)

    async def _wait_for_news(self) -> None:
        """Until there is something to tell. While draining only for a moment: nobody else sees that the agent hangs."""
        if not self._draining.is_set():
            await self._news.wait()
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LISTEN_SECONDS):
                await self._news.wait()

    async def _tell(self, message: _Message) -> bool:
        left_seconds = message.deadline - asyncio.get_running_loop().time()
        # 0 would mean: as configured.
        grace_seconds = 0.0 if message.trainers_gone else max(left_seconds, _LEAST_GRACE_SECONDS)
        async with self._telling:
            try:
                await asyncio.to_thread(self._notify, grace_seconds, message.source, message.trainers_gone)
            except MooringError as error:
                log.warning("run.agent_unreachable", error=str(error))
                return False
            self._told(message)
        return True

    def _say_program_ended(self) -> None:
        """To each agent anew: that it shall leave dies with it, while a notice is in its journal."""
        if not any(message.trainers_gone for message in self._untold):
            self._say(_Message(source="program ended", deadline=0.0, trainers_gone=True))

    def _say(self, message: _Message) -> None:
        self._untold.append(message)
        self._news.set()

    def _told(self, message: _Message) -> None:
        self._untold.remove(message)
        if not self._untold:
            self._news.clear()

    def _terminate(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()

"""Which local ranks are alive, and how the agent asks them to save.

A rank is alive while it holds its liveness lock or an open Attach stream. Save requests go out by the signal file and
by the streams; `rank_hints` notices within a second that the locks may have changed.
"""

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import structlog

from keepstep_agent.adapters.liveness import RankLocks
from keepstep_agent.adapters.rate_limit import RateLimiter
from keepstep_agent.adapters.signal_file import SignalFile
from keepstep_agent.core.agent.commands import RequestSave
from keepstep_agent.core.errors import KeepstepError
from keepstep_agent.core.limits import SECONDS
from keepstep_agent.core.settings.values import Settings
from keepstep_api.signal_file import SaveSignal
from keepstep_api.step_file import StepRecord
from keepstep_api.v1 import agent_pb2

_REQUESTS_KEPT: Final = 16
_AHEAD_SECONDS: Final = 60.0
"""A step of a later moment makes no sense, but the wall clock may just have been corrected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksLook:
    """The local ranks that are alive, and the newest step that one of them tells, if any does."""

    alive: frozenset[int]
    newest: StepRecord | None
    age_seconds: float


@dataclass(eq=False, slots=True, kw_only=True)
class _Stream:
    local_rank: int
    since_unix: float
    requests: "asyncio.Queue[agent_pb2.SaveRequest]" = field(default_factory=lambda: asyncio.Queue(_REQUESTS_KEPT))


class LiveRanks:
    """Local ranks that are alive. `request_save` reaches attached clients; those with a lock read the signal file."""

    def __init__(self, locks: RankLocks, wall: Callable[[], float] = time.time) -> None:
        """`wall`: the clock that trainers tell their steps by."""
        self._locks = locks
        self._wall = wall
        self._streams: list[_Stream] = []

    @contextlib.contextmanager
    def attached(self, local_rank: int) -> "Iterator[asyncio.Queue[agent_pb2.SaveRequest]]":
        """The rank counts as alive while the context is open; the queue has its save requests."""
        stream = _Stream(local_rank=local_rank, since_unix=self._wall())
        self._streams.append(stream)
        try:
            yield stream.requests
        finally:
            self._streams.remove(stream)

    def look(self) -> RanksLook:
        """Blocks for a few system calls per rank. Raises VolumeError."""
        locked = self._locks.live_ranks()
        # A process empties its step file when it takes its lock. Of one that is only attached, the file may be older.
        attached = {stream.local_rank: stream.since_unix for stream in self._streams}
        since_unix = attached | dict.fromkeys(locked, 0.0)
        told = [(self._locks.step(rank), since) for rank, since in since_unix.items()]
        now_unix = self._wall()
        steps = [
            record
            for record, since in told
            if record is not None
            and record.leaving is None
            and max(since, now_unix - SECONDS) <= record.at_unix <= now_unix + _AHEAD_SECONDS
        ]
        newest = max(steps, key=lambda record: record.at_unix, default=None)
        return RanksLook(
            alive=frozenset(since_unix),
            newest=newest,
            age_seconds=max(0.0, now_unix - newest.at_unix) if newest else 0.0,
        )

    def last_steps(self, ranks: frozenset[int] | None, since_unix: float) -> Sequence[StepRecord]:
        """Return what the step files of these ranks say, which have ended, and of all ranks if None. Blocks.

        Those of ranks whose training had ended say nothing. What was written before `since_unix` is of an earlier life.
        """
        known = self._locks.ranks_with_steps() if ranks is None else ranks
        told = [record for rank in known if (record := self._locks.step(rank)) is not None]
        # A rank that has left says so in whole seconds.
        return [record for record in told if record.at_unix + 1.0 >= since_unix]

    def request_save(self, signal: SaveSignal) -> None:
        for stream in self._streams:
            if stream.requests.full():
                # A client that does not read keeps only the latest requests.
                stream.requests.get_nowait()
            stream.requests.put_nowait(
                agent_pb2.SaveRequest(
                    terminating=signal.terminating, deadline=signal.deadline_unix, number=signal.number
                )
            )


_LOOK_SECONDS: Final = 1.0


@contextlib.contextmanager
def rank_hints(locks: RankLocks, hint: asyncio.Event) -> Iterator[None]:
    """Set `hint` when a rank's lock appears, disappears or cannot be read, and when the parent process changes."""
    loop = asyncio.get_running_loop()
    ended = threading.Event()

    def watch() -> None:
        # Unequal to any look, so that a change before the first one counts too.
        seen: object = None
        while not ended.wait(_LOOK_SECONDS):
            now = _look(locks)
            if now != seen:
                seen = now
                # The loop may have closed meanwhile.
                with contextlib.suppress(RuntimeError):
                    loop.call_soon_threadsafe(hint.set)

    # Not an executor's thread: it lives as long as the agent, and nobody may wait for it if the volume hangs.
    threading.Thread(target=watch, name="keepstep-ranks", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _look(locks: RankLocks) -> object:
    try:
        return os.getppid(), locks.live_ranks()
    except KeepstepError as error:
        return str(error)


log = structlog.get_logger("keepstep.agent")


def save_requester(signal_file: SignalFile, live_ranks: LiveRanks) -> Callable[[RequestSave], None]:
    def request(command: RequestSave) -> None:
        try:
            number = signal_file.request(deadline_unix=command.deadline, terminating=command.terminating)
        except KeepstepError as error:
            log.error("signal_file.unwritable", error=str(error), hint=error.hint)
            number = 0
        log.info("save.requested", terminating=command.terminating, deadline=command.deadline, number=number)
        live_ranks.request_save(
            SaveSignal(number=number, deadline_unix=command.deadline, terminating=command.terminating)
        )

    return request


def termination_canceller(signal_file: SignalFile, limiter: RateLimiter, settings: Settings) -> Callable[[], None]:
    """Undoes what a termination notice changed, when the termination is cancelled."""

    def go_on() -> None:
        limiter.set_rate(settings.transfer.bandwidth_bytes_per_second)
        try:
            signal_file.forget_termination()
        except KeepstepError as error:
            log.error("signal_file.unwritable", error=str(error), hint=error.hint)

    return go_on

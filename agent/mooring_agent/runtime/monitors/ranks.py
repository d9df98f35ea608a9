"""Which local ranks are alive, and how the agent asks them to save.

A rank is alive while it holds its liveness lock or an open Attach stream. Save requests go out by the signal file and
by the streams; `rank_hints` notices within a second that the locks may have changed.
"""

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import Final

import structlog

from mooring_agent.adapters.liveness import RankLocks
from mooring_agent.adapters.rate_limit import RateLimiter
from mooring_agent.adapters.signal_file import SignalFile
from mooring_agent.core.agent.commands import RequestSave
from mooring_agent.core.errors import MooringError
from mooring_agent.core.settings.values import Settings
from mooring_api.signal_file import SaveSignal
from mooring_api.v1 import agent_pb2

_REQUESTS_KEPT = 16


class LiveRanks:
    """Local ranks that are alive. `request_save` reaches attached clients; those with a lock read the signal file."""

    def __init__(self, locks: RankLocks) -> None:
        self._locks = locks
        self._streams: list[tuple[int, asyncio.Queue[agent_pb2.SaveRequest]]] = []

    @contextlib.contextmanager
    def attached(self, local_rank: int) -> "Iterator[asyncio.Queue[agent_pb2.SaveRequest]]":
        """The rank counts as alive while the context is open; the queue has its save requests."""
        entry = (local_rank, asyncio.Queue[agent_pb2.SaveRequest](_REQUESTS_KEPT))
        self._streams.append(entry)
        try:
            yield entry[1]
        finally:
            self._streams.remove(entry)

    def alive(self) -> frozenset[int]:
        """Blocks for a few system calls per rank."""
        return self._locks.live_ranks() | {local_rank for local_rank, _ in self._streams}

    def request_save(self, signal: SaveSignal) -> None:
        for _, requests in self._streams:
            if requests.full():
                # A client that does not read keeps only the latest requests.
                requests.get_nowait()
            requests.put_nowait(
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
    threading.Thread(target=watch, name="mooring-ranks", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _look(locks: RankLocks) -> object:
    try:
        return os.getppid(), locks.live_ranks()
    except MooringError as error:
        return str(error)


log = structlog.get_logger("mooring.agent")


def save_requester(signal_file: SignalFile, live_ranks: LiveRanks) -> Callable[[RequestSave], None]:
    def request(command: RequestSave) -> None:
        try:
            number = signal_file.request(deadline_unix=command.deadline, terminating=command.terminating)
        except MooringError as error:
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
        except MooringError as error:
            log.error("signal_file.unwritable", error=str(error), hint=error.hint)

    return go_on

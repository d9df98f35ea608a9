"""Finds complete checkpoints of programs that do not announce them, in the directory they write to.

Owns when to scan and what was reported; `core.watch.directory_rules` owns what counts as complete. Only direct entries
of the directory are checkpoints. Invariants:

- The same content is reported once.
- A pause follows each scan: at least the busy interval, and after a long scan ten times its duration, up to the idle
  interval.
- Events only hasten a scan, so losing them costs at most the idle interval.
"""

import asyncio
import contextlib
import itertools
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import structlog

from mooring_agent.adapters.volume.directory_hints import DirectoryHints
from mooring_agent.adapters.volume.directory_scan import DirectoryScanner
from mooring_agent.core.limits import STEP
from mooring_agent.core.watch.checkpoint_layouts import UNKNOWN_WORLD, DirectorySnapshot
from mooring_agent.core.watch.directory_rules import Observation, Verdict, judge

# Content that two scans find unchanged is not being written.
_LOOKS_WITHOUT_WRITERS: Final = 2
# Scanning all the time would slow down the upload of a checkpoint that has ten thousand files.
_REST_PER_SCAN: Final = 10.0

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundCheckpoint:
    """A complete checkpoint: a directory or a single file. `signature` identifies its content, across restarts too."""

    path: str
    name: str
    step: int
    signature: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchIntervals:
    """How often to scan. A checkpoint is complete only after `quiet_seconds` without a change."""

    quiet_seconds: float = 3.0
    busy_interval_seconds: float = 1.0
    idle_interval_seconds: float = 10.0


class StagingWatch:
    """An endless async iterator of `FoundCheckpoint`s, the oldest first. Call `close` when done with it.

    Args:
        volume: The shared volume.
        directory: The watched directory, below `volume`.
        executor: Runs the scans.
        world_size: Ranks that write checkpoints together; 0 if not known.
        newest_step: The highest step known so far. Checkpoints without a number in their name count on from it.
        known: Signatures not to report.
        spoken_for: Whether Mooring knows the checkpoint at a path (and of a step) from elsewhere, so that the log need
            not say that it is incomplete.
        claimed: Whether a live process claims a path; its checkpoint is not reported meanwhile.
        intervals: How often to scan.
    """

    def __init__(
        self,
        volume: Path,
        directory: Path,
        *,
        executor: Executor,
        world_size: int = 0,
        newest_step: int = 0,
        known: Iterable[str] = (),
        spoken_for: Callable[[str, int | None], bool] = lambda path, step: False,
        claimed: Callable[[Path], bool] = lambda path: False,
        intervals: WatchIntervals | None = None,
    ) -> None:
        self._directory = directory
        self._executor = executor
        self._world_size = world_size
        self._newest_step = newest_step
        self._known = set(known)
        self._spoken_for = spoken_for
        self._claimed = claimed
        self._intervals = intervals or WatchIntervals()
        self._scanner = DirectoryScanner(volume, directory)
        self._looking = asyncio.Lock()
        self._hint = asyncio.Event()
        self._hints: DirectoryHints | None = None
        self._observations: dict[str, Observation] = {}
        self._reasons: dict[str, str] = {}
        self._found: deque[FoundCheckpoint] = deque()
        self._scanned_at: float | None = None
        self._scan_seconds = 0.0
        self._busy = True
        self._unreadable = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> FoundCheckpoint:
        loop = asyncio.get_running_loop()
        while not self._found:
            await self._wait_for_a_reason_to_look()
            self._hint.clear()
            if self._hints is None:
                self._hints = DirectoryHints(self._directory, lambda: _set_from_thread(loop, self._hint))
            async with self._looking:
                began = time.monotonic()
                snapshots = await loop.run_in_executor(self._executor, self._scan, self._hints)
                self._scanned_at = time.monotonic()
                self._scan_seconds = self._scanned_at - began
                self._judge(snapshots)
        return self._found.popleft()

    async def last_looks(self, *, writers_gone: bool, limit_seconds: float) -> AsyncIterator[FoundCheckpoint]:
        """Yield the complete checkpoints that were not reported yet, at the end of the run.

        With `writers_gone` no program writes any more, so it does not wait for quiet. Otherwise a last checkpoint may
        follow: it ends when nothing has changed for the quiet time, or after `limit_seconds`.
        """
        loop = asyncio.get_running_loop()
        began = time.monotonic()
        for look in itertools.count(1):
            async with self._looking:
                snapshots = await loop.run_in_executor(self._executor, self._scan, None)
                self._judge(snapshots, writers_gone=writers_gone)
            while self._found:
                yield self._found.popleft()
            passed_seconds = time.monotonic() - began
            if writers_gone:
                if look == _LOOKS_WITHOUT_WRITERS:
                    return
                continue
            is_quiet = not self._busy and passed_seconds >= self._intervals.quiet_seconds
            if is_quiet or passed_seconds + self._intervals.busy_interval_seconds > limit_seconds:
                return
            await asyncio.sleep(self._intervals.busy_interval_seconds)

    def add_known(self, signature: str) -> None:
        """Do not report this content, because it was announced."""
        self._known.add(signature)

    def close(self) -> None:
        """Stop watching for events. Blocks for a moment. Idempotent."""
        if self._hints is not None:
            self._hints.close()

    async def _wait_for_a_reason_to_look(self) -> None:
        if self._scanned_at is None:
            return
        if not self._busy:
            try:
                async with asyncio.timeout(self._intervals.idle_interval_seconds):
                    await self._hint.wait()
            except TimeoutError:
                return
        long_seconds = min(_REST_PER_SCAN * self._scan_seconds, self._intervals.idle_interval_seconds)
        rest_seconds = self._scanned_at + max(self._intervals.busy_interval_seconds, long_seconds) - time.monotonic()
        await asyncio.sleep(max(0.0, rest_seconds))

    def _scan(self, hints: DirectoryHints | None) -> Sequence[DirectorySnapshot]:
        if hints is not None:
            # Before the scan, so that no change is missed: the scan sees earlier ones, and later ones cause a hint.
            hints.follow()
        try:
            snapshots = self._scanner.scan(time.monotonic())
        except OSError as error:
            if not self._unreadable:
                _log.warning("watch.directory_unreadable", directory=str(self._directory), reason=str(error))
            self._unreadable = True
            return []
        self._unreadable = False
        return snapshots

    def _judge(self, snapshots: Sequence[DirectorySnapshot], *, writers_gone: bool = False) -> None:
        observations: dict[str, Observation] = {}
        reasons: dict[str, str] = {}
        self._busy = False
        in_order = sorted(snapshots, key=lambda snapshot: (snapshot.newest_mtime_ns, snapshot.name))
        for snapshot in in_order:
            verdict = self._verdict(snapshot, writers_gone=writers_gone)
            observations[snapshot.name] = verdict.observation
            self._busy = self._busy or not verdict.quiet
            signature = verdict.observation.signature
            if verdict.complete:
                if signature not in self._known and not self._claimed(self._directory / snapshot.name):
                    self._known.add(signature)
                    self._report(snapshot, verdict.name, verdict.step, signature)
            elif verdict.quiet:
                reasons[snapshot.name] = verdict.reason
                path = str(self._directory / snapshot.name)
                is_news = self._reasons.get(snapshot.name) != verdict.reason
                if is_news and not self._spoken_for(path, verdict.step):
                    # An unknown world size does not pass by itself.
                    log = _log.warning if verdict.reason == UNKNOWN_WORLD else _log.info
                    log("checkpoint_not_complete", path=path, why=verdict.reason)
        self._observations, self._reasons = observations, reasons

    def _verdict(self, snapshot: DirectorySnapshot, *, writers_gone: bool) -> Verdict:
        return judge(
            snapshot,
            self._observations.get(snapshot.name),
            quiet_seconds=0.0 if writers_gone else self._intervals.quiet_seconds,
            world_size=self._world_size,
        )

    def _report(self, snapshot: DirectorySnapshot, name: str, step: int | None, signature: str) -> None:
        step = min(self._newest_step + 1, STEP) if step is None else step
        self._newest_step = max(self._newest_step, step)
        path = str(self._directory / snapshot.name)
        self._found.append(FoundCheckpoint(path=path, name=name, step=step, signature=signature))


def signature_of(volume: Path, path: Path) -> str | None:
    """Return the signature under which a watch would report `path` at present; None if it never would."""
    snapshot = DirectoryScanner(volume, path.parent).look(path.name)
    return snapshot.signature if snapshot else None


def _set_from_thread(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    # The loop may close between any check and the call.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(event.set)

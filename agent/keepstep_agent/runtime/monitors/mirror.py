"""Takes snapshots of the output directories, for programs that announce nothing.

`core.mirror` decides when and of what; this module looks, announces, and remembers what is stored. At most one snapshot
is on its way, except at the end: while it is being sent, the program's next state waits, and nothing is sent twice.
"""

import asyncio
import math
import secrets
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Executor
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeVar

import structlog

from keepstep_agent.adapters.output.announced_paths import AnnouncedPaths
from keepstep_agent.adapters.output.directory_hints import DirectoryHints
from keepstep_agent.adapters.output.output_directories import OutputDirectories
from keepstep_agent.adapters.output.program import has_other_children
from keepstep_agent.adapters.records import recorded_save
from keepstep_agent.core.agent import disk_pressure, drain
from keepstep_agent.core.agent.announcements import check_announcement
from keepstep_agent.core.agent.events import Announced, OutputLooked
from keepstep_agent.core.agent.state import State
from keepstep_agent.core.mirror.base import series_of
from keepstep_agent.core.mirror.output_scan import OutputScan, folder_of, is_log
from keepstep_agent.core.mirror.plan import (
    SnapshotPlan,
    changed_files,
    incomplete_folders,
    plan_snapshot,
    unfinished_folders,
)
from keepstep_agent.core.mirror.quiet_moments import PATIENCE_SECONDS, QUIET_SECONDS, QuietMoments
from keepstep_agent.core.model import Fingerprint, Kind, Phase, SaveInfo
from keepstep_agent.core.settings.values import Settings
from keepstep_agent.ports import Clock
from keepstep_agent.runtime.engine.engine import Engine
from keepstep_agent.runtime.engine.logs import say
from keepstep_agent.runtime.monitors.taken_snapshots import TakenSnapshots, is_over
from keepstep_api.names import RESUMED

_BUSY_SECONDS: Final = 1.0
_IDLE_SECONDS: Final = 10.0
_LONGEST_IDLE_SECONDS: Final = 60.0
# A look at 20,000 files takes a tenth of a second. With these pauses looks take at most a tenth of one CPU while files
# change, and a 600th while nothing happens.
_BUSY_PAUSES_PER_LOOK: Final = 10.0
_IDLE_PAUSES_PER_LOOK: Final = 600.0
_BETWEEN_SNAPSHOTS_SECONDS: Final = 10.0
_LAST_TRIES: Final = 5

T = TypeVar("T")

log = structlog.get_logger("keepstep.mirror")


class Mirror:
    """Mirrors the output directories: `run` for as long as the agent lives, `last_looks` when it ends."""

    def __init__(
        self, *, engine: Engine, settings: Settings, clock: Clock, executor: Executor, parent_pid: int | None
    ) -> None:
        """`parent_pid`: the runner, whose other child is the program."""
        self._parent_pid = parent_pid
        self._alive_at, self._died = time.time(), False
        self._engine = engine
        self._settings = settings
        self._clock = clock
        self._executor = executor
        self._volume, self._state_directory = Path(settings.volume), Path(settings.state_directory)
        self._output = OutputDirectories(self._volume, settings.watch)
        self._announced = AnnouncedPaths(
            self._volume, Path(settings.checkpoint_directory), self._state_directory, self._output
        )
        self._snapshots = TakenSnapshots(engine=engine, settings=settings, executor=executor)
        self._looking = asyncio.Lock()
        self._hint = asyncio.Event()
        self._hints: list[DirectoryHints] = []
        self._moments: QuietMoments | None = None
        self._files: Mapping[str, Fingerprint] = {}
        # The files that restore brought, as long as nobody has read them.
        self._restored: Mapping[str, Fingerprint] = {}
        # New folders that the last plan has left out.
        self._incomplete: frozenset[str] = frozenset()
        # Whether the last look found nothing new, with no program that could still write.
        self._is_empty_at_end = False
        self._next_at = 0.0
        self._look_cpu_seconds = 0.0
        self._pause_seconds = self._least_pause_seconds = 0.0

    async def run(self) -> None:
        """Take a snapshot whenever one is due, until cancelled."""
        loop = asyncio.get_running_loop()
        self._hints = [
            DirectoryHints(directory, lambda: _set_from_thread(loop, self._hint), ignored=is_log)
            for directory in self._output.directories.values()
        ]
        try:
            while True:
                async with self._looking:
                    await self._look()
                await self._pause()
        finally:
            for hints in self._hints:
                await self._run(hints.close)

    async def last_looks(
        self,
        *,
        writers_gone: bool,
        failed_at: float | None,
        survivors_ended_well: bool = False,
        limit_seconds: float,
    ) -> None:
        """Take a last snapshot, at the end of the run; return when it is pinned. Never raises.

        With `writers_gone` no program writes any more, so it does not wait for quiet. Otherwise it waits for at most
        `limit_seconds`. `failed_at`: when the program ended, in unix seconds, if a signal or an error ended it. Folders
        in which it may have been writing then keep their last version.
        """
        began = time.monotonic()
        tries = 0
        try:
            # Of those that outlived the program, the last time that anybody was seen alive tells nothing of it.
            if failed_at is not None and self._died and not survivors_ended_well:
                failed_at = min(failed_at, self._alive_at)
            failed_in = None if failed_at is None else (failed_at - QUIET_SECONDS, math.inf)
            if failed_at is not None and survivors_ended_well:
                failed_in = (failed_at - QUIET_SECONDS, failed_at)
            await self._wait_for_the_one_before()
            while tries < _LAST_TRIES:
                async with self._looking:
                    scan, moments = await self._scan()
                    look = moments.look(scan, time.monotonic())
                    passed_seconds = time.monotonic() - began
                    late = passed_seconds + _BUSY_SECONDS > limit_seconds
                    save = ""
                    # A program that was told to end may begin its last save only now.
                    if writers_gone or late or (passed_seconds >= QUIET_SECONDS and not look.restless):
                        tries += 1
                        held_back = frozenset() if writers_gone else look.held_back
                        save = await self._take(
                            scan, held_back, look.growing, failed_in=failed_in, is_last=writers_gone
                        )
                if tries and (not save or await self._is_pinned(save)):
                    await self._say_if_ignored()
                    return
                await asyncio.sleep(_BUSY_SECONDS)
        except Exception:
            # Whatever lies in these directories, the agent must be able to end.
            log.exception("mirror.failed", hint="this is a bug in the agent: please report it")

    async def nothing_found(self) -> str:
        """Return a line for people if the program has ended and left nothing; else "".

        Then the last looks found nothing, and nothing was restored. Whether anything was announced, the core knows.
        """
        base = self._snapshots.base
        if not self._is_empty_at_end or base.snapshot or base.others or self._engine.state.not_stored:
            return ""
        if await self._run(recorded_save, self._state_directory, RESUMED):
            return ""
        places = " and ".join(self._settings.watch)
        return f"nothing was stored: nothing was announced, and nothing is in {places}"

    async def _wait_for_the_one_before(self) -> None:
        """Wait for a snapshot on its way, so that the last one need not send its files again.

        Not if the store is unreachable, and at most for half of the time that a deadline leaves, or until there is one.
        """
        saves, until = self._snapshots.on_their_way, drain.deadline(self._engine.state)
        limit_seconds = None if until is None else max(0.0, until - self._clock.now()) / 2

        def is_enough(state: State) -> bool:
            is_told = until is None and drain.deadline(state) is not None
            return is_told or state.breaker.is_open or all(is_over(state, save) for save in saves)

        with suppress(TimeoutError):
            async with asyncio.timeout(limit_seconds):
                await self._engine.until(is_enough)

    async def _say_if_ignored(self) -> None:
        """Say so if the program has read nothing of what restore brought, although it is still there."""
        if not self._restored or self._engine.state.termination.noticed:
            return
        if await self._run(self._output.unread, self._restored):
            places = " and ".join(self._settings.watch)
            say(
                f"keepstep: the program read none of the {len(self._restored)} files that were restored to {places}: "
                "if it was to resume, give it the option that makes it look there"
            )

    async def _look(self) -> None:
        self._hint.clear()
        # Before the look, so that no change is missed: the look sees earlier ones, and later ones cause a hint.
        for hints in self._hints:
            await self._run(hints.follow)
        scan, moments = await self._scan()
        look = moments.look(scan, time.monotonic())
        may_take = not self._snapshots.on_their_way and time.monotonic() >= self._next_at
        # After the look: a program that has died since may have left half a checkpoint, which looks quiet.
        if await self._program_lives() and look.due and may_take:
            await self._take(scan, look.held_back, look.growing)
        seconds = self._look_cpu_seconds
        is_busy = look.restless or scan.missing or (look.due and not self._snapshots.on_their_way)
        self._pause_seconds = (
            max(_BUSY_SECONDS, seconds * _BUSY_PAUSES_PER_LOOK)
            if is_busy
            else min(max(_IDLE_SECONDS, seconds * _IDLE_PAUSES_PER_LOOK), _LONGEST_IDLE_SECONDS)
        )
        self._least_pause_seconds = max(_BUSY_SECONDS, seconds * _BUSY_PAUSES_PER_LOOK)

    async def _program_lives(self) -> bool:
        """Whether the runner's program lives; notes when it was last seen alive, as the runner may be late to tell."""
        now = time.time()
        lives = await self._run(has_other_children, self._parent_pid)
        if lives:
            self._alive_at, self._died = now, False
        else:
            self._died = True
        return lives

    async def _pause(self) -> None:
        """Wait until the next look: less long if something changes, or if a snapshot ends that others wait for."""
        await asyncio.sleep(min(self._least_pause_seconds, self._pause_seconds))
        left_seconds = self._pause_seconds - self._least_pause_seconds
        if left_seconds <= 0:
            return
        reasons: set[asyncio.Task[Any]] = {asyncio.create_task(self._hint.wait())}
        if saves := self._snapshots.on_their_way:
            ended = self._engine.until(lambda state: any(is_over(state, save) for save in saves))
            reasons.add(asyncio.create_task(ended))
        try:
            await asyncio.wait(reasons, timeout=left_seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for reason in reasons:
                reason.cancel()
            await asyncio.gather(*reasons, return_exceptions=True)

    async def _scan(self) -> tuple[OutputScan, QuietMoments]:
        if self._moments is None:
            await self._begin()
        assert self._moments is not None
        pause_seconds = await self._snapshots.settle()
        if pause_seconds is not None:
            self._next_at = time.monotonic() + pause_seconds
            self._moments.missed(time.monotonic())
        announced = [
            f"{one.announced.path}/{file}".rstrip("/")
            for checkpoint in self._engine.state.checkpoints.values()
            for one in checkpoint.contributions.values()
            if one.announced.snapshot is None
            for file in one.announced.files or ("",)
        ]
        left_out = await self._run(self._announced.find, announced)
        scan = await self._run(self._timed_scan, left_out)
        self._files = scan.files
        return scan, self._moments

    def _timed_scan(self, left_out: frozenset[str]) -> OutputScan:
        began = time.thread_time()
        scan = self._output.scan(left_out, self._files)
        self._look_cpu_seconds = time.thread_time() - began
        return scan

    async def _begin(self) -> None:
        await self._snapshots.begin()
        base = self._snapshots.base
        self._moments = QuietMoments({**self._snapshots.pinned, **base.others})
        brought = {**{path: held.fingerprint for path, held in base.files.items()}, **base.others}
        restored = {path: seen for path, seen in brought.items() if not is_log(path)}
        self._restored = restored if await self._run(self._output.unread, restored) else {}

    async def _take(
        self,
        scan: OutputScan,
        held_back: frozenset[str],
        growing: frozenset[str],
        *,
        failed_in: tuple[float, float] | None = None,
        is_last: bool = False,
    ) -> str:
        """Announce a snapshot; return its save, or "" if everything is stored already or on its way.

        `failed_in`: from when to when, in unix seconds, a program may have written files that it could not complete.
        """
        assert self._moments is not None
        if self._snapshots.are_of(scan):
            return ""
        plan = await self._plan(scan, held_back, growing, failed_in=failed_in, is_last=is_last)
        self._is_empty_at_end = is_last and not plan.is_news
        if plan.not_stored != self._engine.state.not_stored:
            await self._engine.submit(OutputLooked(at=self._clock.now(), not_stored=plan.not_stored))
        self._moments.taken()
        if self._incomplete:
            # Look again even if nothing changes any more.
            self._moments.missed(time.monotonic())
            self._next_at = time.monotonic() + _BETWEEN_SNAPSHOTS_SECONDS
        if not plan.is_news or (failed_in is not None and plan.not_stored and self._snapshots.on_their_way):
            # The one on its way may have newer versions of what this one would leave as it is in the base.
            return ""
        event = self._announcement(plan)
        await self._snapshots.add(event.info.save, plan, scan)
        await self._engine.submit(event, lambda state: _checked(state, event))
        self._next_at = time.monotonic() + _BETWEEN_SNAPSHOTS_SECONDS
        sent_bytes = sum(file.fingerprint.size_bytes for file in plan.content.files)
        log.info(
            "snapshot.taken",
            save=event.info.save,
            sent=len(plan.content.files),
            sent_bytes=sent_bytes,
            kept=len(plan.content.kept),
            not_stored=len(plan.not_stored),
        )
        return event.info.save

    async def _plan(
        self,
        scan: OutputScan,
        held_back: frozenset[str],
        growing: frozenset[str],
        *,
        failed_in: tuple[float, float] | None,
        is_last: bool,
    ) -> SnapshotPlan:
        changed = [path for path in changed_files(scan, self._snapshots.base) if not is_log(path)]
        broken, whole = await self._run(self._output.examine, changed)
        if failed_in is not None:
            since, until = failed_in
            # Not what a snapshot on its way has: it may be all but one file of a checkpoint before.
            pinned = self._snapshots.pinned
            new = {path: scan.files[path] for path in changed if scan.files[path] != pinned.get(path)}
            recent = [path for path in new if since <= scan.files[path].mtime_ns / 1e9 <= until]
            held_back |= unfinished_folders(new, recent=recent, whole=whole, together=self._snapshots.together)
        elif not is_last:
            self._incomplete = self._incomplete_folders(scan, changed)
            held_back |= self._incomplete
        return plan_snapshot(
            scan,
            self._snapshots.base,
            held_back=held_back,
            growing=growing,
            broken=broken,
            pinned_before=self._snapshots.pinned,
            budget_bytes=disk_pressure.budget_bytes(self._engine.state),
        )

    def _incomplete_folders(self, scan: OutputScan, changed: Collection[str]) -> frozenset[str]:
        """Return the new folders with fewer files than usual, unless nothing was written there for long.

        A program may do something else between two files of a checkpoint.
        """
        known = {folder_of(path) for path in self._snapshots.base.files}
        since_ns = time.time_ns() - int(PATIENCE_SECONDS * 1e9)
        written = {folder_of(path) for path in changed if scan.files[path].mtime_ns >= since_ns}
        looks = {path: scan.files[path] for path in changed}
        return (incomplete_folders(looks, self._snapshots.together) & written) - known

    def _announcement(self, plan: SnapshotPlan) -> Announced:
        now = self._clock.now()
        return Announced(
            at=now,
            info=SaveInfo(
                save=f"{self._settings.attempt or secrets.token_hex(4)}-{secrets.token_hex(4)}",
                name=series_of(self._settings.node_rank),
                # Numbers of one series grow, and show their time.
                step=max(int(now), self._snapshots.last_number + 1),
                kind=Kind.SNAPSHOT,
                world_size=1,
            ),
            rank=0,
            path=self._settings.watch[0],
            files=(),
            local_world_size=1,
            snapshot=plan.content,
        )

    async def _is_pinned(self, save: str) -> bool:
        def settled(state: State) -> bool:
            checkpoint = state.checkpoints.get(save)
            return checkpoint is None or checkpoint.phase is not Phase.ANNOUNCED

        await self._engine.until(settled)
        checkpoint = self._engine.state.checkpoints.get(save)
        return checkpoint is not None and checkpoint.phase is not Phase.FAILED

    async def _run(self, function: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, *arguments)


def _checked(state: State, event: Announced) -> bool:
    check_announcement(state, event)
    return True


def _set_from_thread(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    # The loop may close between any check and the call.
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(event.set)

"""Takes snapshots of the output directories, for programs that announce nothing.

`core.mirror` decides when and of what; this module looks, announces, and remembers what is stored. At most one snapshot
is on its way, except at the end: while it is being sent, the program's next state waits, and nothing is sent twice.
"""

import asyncio
import math
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import structlog

from keepstep_agent.adapters.output.announced_paths import AnnouncedPaths
from keepstep_agent.adapters.output.directory_hints import DirectoryHints
from keepstep_agent.adapters.output.file_prober import FileProber
from keepstep_agent.adapters.output.output_directories import OutputDirectories
from keepstep_agent.adapters.output.program import living_below, other_children
from keepstep_agent.adapters.records import recorded_save
from keepstep_agent.core.agent import disk_pressure, drain, planner
from keepstep_agent.core.agent.announcements import check_announcement
from keepstep_agent.core.agent.events import Announced, OutputLooked
from keepstep_agent.core.agent.state import State
from keepstep_agent.core.errors import printable
from keepstep_agent.core.mirror.base import series_of
from keepstep_agent.core.mirror.file_states import QUIET_SECONDS
from keepstep_agent.core.mirror.output_history import DUE_SECONDS, Decision, OutputHistory, ProgramEnd
from keepstep_agent.core.mirror.output_scan import OutputScan, is_log
from keepstep_agent.core.mirror.plan import SnapshotPlan, plan_snapshot
from keepstep_agent.core.model import Fingerprint, Kind, Phase, SaveInfo
from keepstep_agent.core.policies.repeated_deaths import MEMORY_HINT, OUTPUT_DIRECTORIES
from keepstep_agent.core.settings.values import Settings
from keepstep_agent.ports import Clock
from keepstep_agent.runtime.engine.engine import Engine
from keepstep_agent.runtime.engine.logs import say
from keepstep_agent.runtime.monitors.taken_snapshots import TakenSnapshots, is_over
from keepstep_api.names import RESUMED

# How exactly it is known when a write began, and so which files were written together.
_BUSY_SECONDS: Final = 0.25
_IDLE_SECONDS: Final = 10.0
_LONGEST_IDLE_SECONDS: Final = 60.0
# A look at 20,000 files takes a tenth of a second. With these pauses looks take at most a tenth of one CPU while files
# change, and a 600th while nothing happens.
_BUSY_PAUSES_PER_LOOK: Final = 10.0
_IDLE_PAUSES_PER_LOOK: Final = 600.0
_BETWEEN_SNAPSHOTS_SECONDS: Final = 10.0
_EARLIER_SECONDS: Final = 8.0
_WARN_SECONDS: Final = 60.0
_LAST_TRIES: Final = 5
_LAST_PAUSE_SECONDS: Final = 1.0

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
        self._program_pids: frozenset[int] = frozenset()
        # All processes of the program at the last look, and since when none of them has ended; monotonic.
        self._processes: frozenset[int] = frozenset()
        self._all_live_since = math.inf
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
        self._prober = FileProber(self._output)
        self._history: OutputHistory | None = None
        self._files: Mapping[str, Fingerprint] = {}
        # The files that restore brought, as long as nobody has read them.
        self._restored: Mapping[str, Fingerprint] = {}
        self._was_read = self._has_sent_data = False
        # Whether the last look found nothing new, with no program that could still write.
        self._is_empty_at_end = False
        self._next_at = 0.0
        self._taken_at = self._warned_at = self._slow_at = 0.0
        # The links of the look that the last snapshot was planned from.
        self._planned_links: Mapping[str, str] | None = None
        # What the last snapshot had to leave out, and what was named last.
        self._left_out: frozenset[str] = frozenset()
        self._named: frozenset[str] = frozenset()
        # What restore does not bring back as it is: how, with one such path. And what was said of it.
        self._come_back_changed: dict[str, str] = {}
        self._said_to_change: set[str] = set()
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
                if planner.may_begin(self._engine.state, OUTPUT_DIRECTORIES):
                    async with self._looking:
                        await self._look()
                    await self._pause()
                else:
                    await asyncio.sleep(_IDLE_SECONDS)
        finally:
            for hints in self._hints:
                await self._run(hints.close)

    async def last_looks(
        self,
        *,
        writers_gone: bool,
        failed_at: float | None,
        failed_early: bool = False,
        survivors_ended_well: bool = False,
        limit_seconds: float,
    ) -> None:
        """Take a last snapshot, at the end of the run; return when it is pinned. Never raises.

        With `writers_gone` no program writes any more, so it does not wait for quiet. Otherwise it waits for at most
        `limit_seconds`. `failed_at`: when the program ended, in unix seconds, if a signal or an error ended it. What it
        may have been writing then keeps its last version. `failed_early`: soon after its start. Then logs alone are no
        news: a snapshot of them would be one more that the program fails with.
        """
        began = time.monotonic()
        tries = 0
        try:
            # Of those that outlived the program, the last time that anybody was seen alive tells nothing of it.
            if failed_at is not None and self._died and not survivors_ended_well:
                failed_at = min(failed_at, self._alive_at)
            end = _program_end(failed_at, survivors_ended_well=survivors_ended_well) if writers_gone else None
            await self._wait_for_the_one_before()
            if not await self._may_look(limit_seconds):
                return
            while tries < _LAST_TRIES:
                async with self._looking:
                    scan, decision = await self._observe(lives=not writers_gone, end=end)
                    passed_seconds = time.monotonic() - began
                    late = passed_seconds + _LAST_PAUSE_SECONDS > limit_seconds
                    save = ""
                    # A program that was told to end may begin its last save only now.
                    if writers_gone or late or (passed_seconds >= QUIET_SECONDS and not decision.restless):
                        tries += 1
                        save = await self._take(scan, decision, is_last=writers_gone, besides_logs=failed_early)
                if tries and (not save or await self._is_pinned(save)):
                    await self._say_if_ignored()
                    return
                await asyncio.sleep(_LAST_PAUSE_SECONDS)
        except Exception:
            # Whatever lies in these directories, the agent must be able to end.
            log.exception("mirror.failed", hint="this is a bug in the agent: please report it")

    async def _may_look(self, limit_seconds: float) -> bool:
        """Wait until the directories may be looked at, if that killed agents; False, and said, if they may not."""

        def is_decided(state: State) -> bool:
            suspect = state.suspects.get(OUTPUT_DIRECTORIES)
            was_tried_again = suspect is not None and suspect.was_tried_again
            return was_tried_again or planner.may_begin(state, OUTPUT_DIRECTORIES)

        with suppress(TimeoutError):
            async with asyncio.timeout(limit_seconds):
                await self._engine.until(is_decided)
        suspect = self._engine.state.suspects.get(OUTPUT_DIRECTORIES)
        if suspect is None or planner.may_begin(self._engine.state, OUTPUT_DIRECTORIES):
            return True
        line = f"{' and '.join(self._settings.watch)}: {suspect}; {MEMORY_HINT}"
        await self._engine.submit(OutputLooked(at=self._clock.now(), not_stored=(line,)))
        return False

    @property
    def is_as_restored(self) -> bool:
        """Whether the program is known to have read what restore brought, and nothing new but logs was sent."""
        return self._was_read and not self._has_sent_data

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
        return f"nothing was stored: nothing was announced, and nothing that can be stored is in {places}"

    async def _wait_for_the_one_before(self) -> None:
        """Wait for a snapshot on its way, so that the last one need not send its files again.

        Not if the store is unreachable or refuses it, and at most for half of the time that a deadline leaves, or until
        there is one.
        """
        saves, until = self._snapshots.on_their_way, drain.deadline(self._engine.state)
        limit_seconds = None if until is None else max(0.0, until - self._clock.now()) / 2

        def is_enough(state: State) -> bool:
            is_told = until is None and drain.deadline(state) is not None
            return is_told or drain.is_at_standstill(state) or all(is_over(state, save) for save in saves)

        with suppress(TimeoutError):
            async with asyncio.timeout(limit_seconds):
                await self._engine.until(is_enough)

    async def _say_if_ignored(self) -> None:
        """Say so if the program has read nothing of what restore brought, although it is still there."""
        if not self._restored or self._engine.state.termination.noticed:
            return
        is_unread = await self._run(self._output.unread, self._restored)
        self._was_read = is_unread is False
        if is_unread:
            places = " and ".join(self._settings.watch)
            say(
                f"keepstep: the program read none of the {len(self._restored)} files of the last snapshot in {places}: "
                "if it was to resume, give it the option that makes it look there"
            )

    async def _look(self) -> None:
        self._hint.clear()
        # Before the look, so that no change is missed: the look sees earlier ones, and later ones cause a hint.
        for hints in self._hints:
            await self._run(hints.follow)
        scan, decision = await self._observe(lives=True)
        if decision.due and self._may_take(decision) and not self._died:
            await self._take(scan, decision)
        else:
            await self._tell_what_is_not_fit(scan, decision)
        seconds = self._look_cpu_seconds
        busy_seconds = max(_BUSY_SECONDS, seconds * _BUSY_PAUSES_PER_LOOK)
        is_busy = decision.restless or scan.missing
        self._pause_seconds = (
            busy_seconds if is_busy else min(max(_IDLE_SECONDS, seconds * _IDLE_PAUSES_PER_LOOK), _LONGEST_IDLE_SECONDS)
        )
        if decision.due and not self._snapshots.on_their_way:
            self._pause_seconds = min(self._pause_seconds, max(busy_seconds, self._next_at - time.monotonic()))
        self._least_pause_seconds = busy_seconds

    def _may_take(self, decision: Decision) -> bool:
        """Whether it is time for another snapshot; earlier, if the last one had to leave out what is fit now."""
        if self._snapshots.on_their_way:
            return False
        was_left_out = not decision.fit.isdisjoint(self._left_out | self._snapshots.not_pinned)
        return time.monotonic() >= self._next_at - (_EARLIER_SECONDS if was_left_out else 0.0)

    async def _tell_what_is_not_fit(self, scan: OutputScan, decision: Decision) -> None:
        """Name what is left out while the program runs; warn if nothing could be stored for long, or only slowly."""
        now = time.monotonic()
        waiting_since = now if decision.waiting_since is None else max(decision.waiting_since, self._taken_at)
        is_late = now - waiting_since >= DUE_SECONDS
        unfit = decision.left_out.keys() | scan.problems.keys()
        if unfit != self._named and (is_late or not decision.left_out):
            self._named = frozenset(unfit)
            await self._note_not_stored(await self._plan(scan, decision))
        if decision.due and self._snapshots.on_their_way and now - max(self._taken_at, self._slow_at) >= _WARN_SECONDS:
            self._slow_at = now
            log.warning(
                "snapshot.store_is_slow",
                seconds=round(now - self._taken_at),
                hint="the program saves faster than the store takes it: its newest state is sent when this is there",
            )
        if decision.left_out and not decision.fit and now - max(waiting_since, self._warned_at) >= _WARN_SECONDS:
            self._warned_at = now
            log.warning(
                "snapshot.nothing_fit",
                seconds=round(now - waiting_since),
                not_stored=self._engine.state.not_stored,
                hint="let the program write each file under another name and rename it, or rest between two saves",
            )

    def _program_lives(self) -> bool:
        """Whether the runner's program lives; notes when it was last seen alive, as the runner may be late to tell."""
        now = time.time()
        children = other_children(self._parent_pid)
        # What a launcher leaves behind becomes the runner's child: whoever wrote may be dead, though others live.
        self._program_pids = self._program_pids or children or frozenset()
        lives = children is None or not children.isdisjoint(self._program_pids)
        if lives:
            self._alive_at, self._died = now, False
        else:
            self._died = True
        living = () if self._parent_pid is None else living_below(self._parent_pid, besides=os.getpid())
        before, self._processes = self._processes, frozenset(living)
        if not before or not before <= self._processes:
            self._all_live_since = time.monotonic() if self._processes else math.inf
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

    async def _observe(self, *, lives: bool, end: ProgramEnd | None = None) -> tuple[OutputScan, Decision]:
        """Look, and decide what the look means. `lives`: the program has not ended, as far as is known."""
        with self._engine.doing(OUTPUT_DIRECTORIES, "look at the output directories"):
            if self._history is None:
                await self._begin()
            assert self._history is not None
            pause_seconds = await self._snapshots.settle()
            if pause_seconds is not None:
                self._next_at = time.monotonic() + pause_seconds
                self._planned_links = None
            announced = [
                f"{one.announced.path}/{file}".rstrip("/")
                for checkpoint in self._engine.state.checkpoints.values()
                for one in checkpoint.contributions.values()
                if one.announced.snapshot is None
                for file in one.announced.files or ("",)
            ]
            return await self._run(self._look_and_decide, self._history, announced, self._snapshots.refused, lives, end)

    def _look_and_decide(
        self,
        history: OutputHistory,
        announced: Sequence[str],
        refused: Mapping[str, str],
        lives: bool,
        end: ProgramEnd | None,
    ) -> tuple[OutputScan, Decision]:
        left_out = self._announced.find(announced)
        began = time.thread_time()
        parts = self._announced.look_alikes(announced, left_out, self._snapshots.stored)
        scan = self._output.scan(left_out, self._files, parts).without(refused)
        at, unix_at = time.monotonic(), time.time()
        self._files = scan.files
        self._come_back_changed |= scan.comes_back_changed
        evidence = self._prober.examine(history.to_examine(scan, self._snapshots.stored))
        # After both: a program that has died since may have left half a checkpoint, which looks closed.
        lives = lives and self._program_lives()
        since = self._all_live_since if lives else math.inf
        history.note(scan, evidence, at=at, unix_at=unix_at, lives=lives, all_live_since=since)
        links = self._snapshots.base.links if self._planned_links is None else self._planned_links
        decision = history.decide(self._snapshots.stored, links, end)
        self._look_cpu_seconds = time.thread_time() - began
        return scan, decision

    async def _begin(self) -> None:
        await self._snapshots.begin()
        base = self._snapshots.base
        self._history = await self._run(self._history_so_far)
        brought = {**base.files.looks(), **base.others}
        restored = {path: seen for path, seen in brought.items() if not is_log(path)}
        self._restored = restored if await self._run(self._output.unread, restored) else {}

    def _history_so_far(self) -> OutputHistory:
        earlier = self._snapshots.groups_before()
        return OutputHistory(self._snapshots.stored, earlier, log_inodes=frozenset(_inodes_of_own_output()))

    async def _take(
        self, scan: OutputScan, decision: Decision, *, is_last: bool = False, besides_logs: bool = False
    ) -> str:
        """Announce a snapshot; return its save, or "" if all that is fit for one is stored already or on its way.

        `besides_logs`: not of logs alone.
        """
        if self._snapshots.are_of(scan):
            return ""
        plan = await self._plan(scan, decision)
        self._is_empty_at_end = is_last and not plan.is_news
        await self._note_not_stored(plan)
        stored, base = self._snapshots.stored, self._snapshots.base.files
        # The one on its way has newer versions of what this one would leave as it is in the base.
        in_base = {path: base[path].fingerprint for path in decision.left_out if path in base}
        goes_back = bool(self._snapshots.on_their_way) and any(
            stored.get(path) != in_base.get(path) for path in decision.left_out
        )
        self._planned_links = scan.links
        has_data = any(file.path not in decision.growing for file in plan.content.files)
        self._say_what_comes_back_changed()
        if not plan.is_news or goes_back or (besides_logs and not has_data):
            self._next_at = time.monotonic() + _BETWEEN_SNAPSHOTS_SECONDS
            return ""
        event = self._announcement(plan)
        await self._snapshots.add(event.info.save, plan, scan)
        await self._engine.submit(event, lambda state: _checked(state, event))
        self._taken_at, self._left_out = time.monotonic(), frozenset(decision.left_out)
        self._named = self._left_out | scan.problems.keys()
        self._has_sent_data |= has_data
        assert self._history is not None
        self._history.taken()
        self._next_at = self._taken_at + _BETWEEN_SNAPSHOTS_SECONDS
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

    def _say_what_comes_back_changed(self) -> None:
        for how in self._come_back_changed.keys() - self._said_to_change:
            self._said_to_change.add(how)
            log.warning(
                "snapshot.comes_back_changed",
                comes_back=how,
                such_as=printable(self._come_back_changed[how]),
                hint="a snapshot has names, bytes, times and symbolic links",
            )

    async def _plan(self, scan: OutputScan, decision: Decision) -> SnapshotPlan:
        # In a thread: with 100,000 files it takes seconds.
        plan = partial(
            plan_snapshot,
            scan,
            self._snapshots.base,
            decision,
            pinned_before=self._snapshots.pinned,
            budget_bytes=disk_pressure.budget_bytes(self._engine.state),
        )
        return await self._run(plan)

    async def _note_not_stored(self, plan: SnapshotPlan) -> None:
        if plan.not_stored != self._engine.state.not_stored:
            await self._engine.submit(OutputLooked(at=self._clock.now(), not_stored=plan.not_stored))

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
        """Wait until a snapshot is pinned; return whether it is, with all its files."""

        def settled(state: State) -> bool:
            checkpoint = state.checkpoints.get(save)
            return checkpoint is None or checkpoint.phase is not Phase.ANNOUNCED

        await self._engine.until(settled)
        checkpoint = self._engine.state.checkpoints.get(save)
        if checkpoint is None or checkpoint.phase is Phase.FAILED:
            return False
        (contribution,) = checkpoint.contributions.values()
        snapshot = contribution.announced.snapshot
        return snapshot is None or len(contribution.files) == len(snapshot.files)

    async def _run(self, function: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, *arguments)


def _program_end(failed_at: float | None, *, survivors_ended_well: bool) -> ProgramEnd:
    if failed_at is None:
        return ProgramEnd()
    at = failed_at - time.time() + time.monotonic()
    return ProgramEnd(failed_at=at, until=at if survivors_ended_well else math.inf)


def _checked(state: State, event: Announced) -> bool:
    check_announcement(state, event)
    return True


def _inodes_of_own_output() -> Iterator[int]:
    """Yield the inodes of the files that the lines of runner and agent go to: each snapshot makes them longer."""
    for descriptor in (1, 2):
        with suppress(OSError):
            status = os.fstat(descriptor)
            if stat.S_ISREG(status.st_mode):
                yield status.st_ino


def _set_from_thread(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    # The loop may close between any check and the call.
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(event.set)

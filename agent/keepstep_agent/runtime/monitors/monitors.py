"""Observes what nobody tells the agent: live ranks, their steps, room on the volume, its signals, unannounced saves."""

import asyncio
import os
import time
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeVar

import structlog

from keepstep_agent.adapters.liveness import RankLocks
from keepstep_agent.adapters.volume.disk import RESERVE_BYTES, Reserve, VolumeMeter
from keepstep_agent.core.agent import disk_pressure, drain, planner
from keepstep_agent.core.agent.checkpoint import Checkpoint
from keepstep_agent.core.agent.disk_pressure import Admission
from keepstep_agent.core.agent.events import DiskRead, RanksSeen, StopRequested, TerminationNoticed
from keepstep_agent.core.agent.state import State
from keepstep_agent.core.errors import KeepstepError
from keepstep_agent.core.model import Kind
from keepstep_agent.core.policies.progress import StepSign
from keepstep_agent.core.settings.values import Settings
from keepstep_agent.ports import Clock
from keepstep_agent.runtime.engine.engine import Engine
from keepstep_agent.runtime.engine.logs import say
from keepstep_agent.runtime.monitors.mirror import Mirror
from keepstep_agent.runtime.monitors.progress import StepWatch
from keepstep_agent.runtime.monitors.ranks import LiveRanks, rank_hints
from keepstep_agent.runtime.monitors.unannounced import UnannouncedRecovery
from keepstep_api.step_file import Leaving

_LINES: Final = 10

log = structlog.get_logger("keepstep.agent")


def say_what_is_open(state: State, source: str, now: float) -> None:
    """Log what is not durable yet: one line for machines, then a line for people per checkpoint, the newest first."""
    unfinished = list(reversed(state.unfinished.values()))
    awaits_save = drain.waiting_for_save(state)
    until = drain.deadline(state)
    left_seconds = None if until is None else round(until - now, 1)
    rate = state.upload_rate.bytes_per_second
    remaining_bytes = sum(checkpoint.remaining_bytes for checkpoint in unfinished)
    log.warning(
        "termination.open",
        source=source,
        seconds_left=left_seconds,
        not_durable=len(unfinished),
        remaining_bytes=remaining_bytes,
        bytes_per_second=round(rate),
        seconds_needed=round(remaining_bytes / rate, 1) if rate else None,
        awaits_save=awaits_save,
        storage_error=state.storage_error,
    )
    if not unfinished and not awaits_save:
        return
    limit = "no deadline" if left_seconds is None else f"{left_seconds} s until SIGKILL, as far as the agent knows"
    say(
        f"keepstep: {source}: {limit}; not durable yet: {len(unfinished)} checkpoints, {remaining_bytes} bytes"
        + (f", {remaining_bytes / rate:.1f} s at the measured rate" if rate and remaining_bytes else "")
        + ("; waiting for the trainers' last save" if awaits_save else "")
    )
    for checkpoint in unfinished[:_LINES]:
        say(f"keepstep: open: {_describe(state, checkpoint)}")
    if len(unfinished) > _LINES:
        say(f"keepstep: open: and {len(unfinished) - _LINES} older ones")


def _describe(state: State, checkpoint: Checkpoint) -> str:
    needed_seconds = drain.needed_seconds(state, checkpoint)
    return (
        f"{checkpoint.info} is {checkpoint.phase}, "
        f"{checkpoint.remaining_bytes} of {checkpoint.size_bytes} bytes left"
        + (f", {needed_seconds:.1f} s" if needed_seconds else "")
    )


# The longest time between two looks at the ranks. A change wakes the monitor within a second.
_CALM_SECONDS: Final = 10.0
_ENDING_SECONDS: Final = 0.1
_DISK_BUSY_SECONDS: Final = 1.0
_DISK_IDLE_SECONDS: Final = 10.0
_SILENT_SECONDS: Final = 30.0
# Walking ten thousand files every second would slow their upload by a third.
_DISK_REST_PER_WALK: Final = 10.0
# The pins of a shed checkpoint are dropped within moments; a save waits no longer than this for the room.
_ADMISSION_WAIT_SECONDS: Final = 0.5
_ROOM_TO_KEEP_A_RESERVE: Final = 4
# For asking the store what it has, while the end of the pod or a caller waits.
_ASKING_SECONDS: Final = 4.0
# For the upload of what the last looks find.
_DRAIN_SECONDS: Final = 1.0
# A rank may end a moment after the program that started it, and the end of its connection is seen a moment later.
_LEFT_BEHIND_AFTER_SECONDS: Final = 2.0
_PROGRAM_ENDED: Final = "program ended"

T = TypeVar("T")


class Monitors:
    """Turns what it observes into the engine's events."""

    def __init__(
        self,
        *,
        engine: Engine,
        clock: Clock,
        live_ranks: LiveRanks,
        executor: Executor,
        settings: Settings,
        mirror: Mirror | None,
        unannounced: UnannouncedRecovery,
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._live_ranks = live_ranks
        self._executor = executor
        self._settings = settings
        self._mirror = mirror
        self._unannounced = unannounced
        self._reserve = Reserve(Path(settings.volume))
        self._steps = StepWatch(engine, clock)
        self._meter = VolumeMeter(Path(settings.volume))
        self._look = asyncio.Event()
        self._looking = asyncio.Lock()
        self._looked_since_notice = False
        self._clients_gone = asyncio.Event()
        self._clients_seen = False
        self._unknown = ""
        # While ranks that the program has left behind may still save: until then, in unix seconds.
        self._left_behind_until: float | None = None
        self.program_failed = False
        """Whether a signal or an error has ended the runner's program."""
        self.failed_early = False
        """Whether an error did, so soon that what restore brought may be the reason, with nothing new to store."""

    async def watch_ranks(self, parent_pid: int | None) -> None:
        """Watch which ranks are alive, until cancelled. `parent_pid`: the runner; the agent stops when it is gone."""
        with rank_hints(RankLocks(Path(self._settings.volume)), self._look):
            while True:
                self._look.clear()
                await self.look_at_ranks()
                await self._drain_without_left_behind()
                if parent_pid is not None and parent_pid != os.getppid():
                    log.warning("runner.gone")
                    parent_pid = None
                    await self.stop("runner gone")
                ending = self._engine.state.termination.noticed
                calm_seconds = self._steps.seconds_to_next_look(_CALM_SECONDS)
                with suppress(TimeoutError):
                    async with asyncio.timeout(_ENDING_SECONDS if ending else calm_seconds):
                        await self._look.wait()

    async def watch_unannounced(self) -> None:
        """Announce what clients saved and no agent took: at the start, and whenever the last client is gone.

        Also every half minute while a rank lives that has not registered, because its image may lack gRPC, and when
        something may be tried again that was refused because it had killed agents.

        Runs until cancelled, apart from `watch_ranks`: the store is still being opened at the start, and asking it may
        take long.
        """
        while True:
            self._clients_gone.clear()
            await self._unannounced.look()
            await self._clients_gone_or_silent()

    async def _clients_gone_or_silent(self) -> None:
        """Return when the last client is gone, or after a while if there may be records that nobody announces."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_SILENT_SECONDS):
                    await self._clients_gone.wait()
                    return
            state = self._engine.state
            if any(rank not in state.ranks for rank in state.alive_ranks) or planner.may_take_announcement(state):
                return

    async def watch_disk(self) -> None:
        """Watch how full the volume is, until cancelled; less often while nothing goes on, or if a look takes long."""
        while True:
            began = time.monotonic()
            await self.look_at_disk()
            rest_seconds = min(_DISK_REST_PER_WALK * (time.monotonic() - began), _DISK_IDLE_SECONDS)
            least_seconds = max(_DISK_BUSY_SECONDS, rest_seconds)
            busy = bool(self._engine.state.unfinished)
            seen = self._engine.revision
            with suppress(TimeoutError):
                async with asyncio.timeout(least_seconds if busy else _DISK_IDLE_SECONDS):
                    await self._engine.next_change(seen)
                    await asyncio.sleep(least_seconds)

    def look_soon(self) -> None:
        self._look.set()

    async def look_at_ranks(self) -> None:
        """Tell the core which ranks are alive, and how others have ended."""
        # One after the other: an older look must not bring back what is gone.
        async with self._looking:
            await self._look_at_ranks()

    async def _look_at_ranks(self) -> None:
        noticed = self._engine.state.termination.noticed
        try:
            look = await self._run(self._live_ranks.look)
        except KeepstepError as error:
            # Logged once: looks are frequent, and the error lasts for as long as another user's trainer runs.
            if str(error) != self._unknown:
                self._unknown = str(error)
                log.warning("ranks.unknown", error=str(error), hint=error.hint)
            return
        if self._unknown:
            self._unknown = ""
            log.info("ranks.known_again")
        alive = look.alive
        self._clients_seen = self._clients_seen or bool(alive)
        if alive != self._engine.state.alive_ranks:
            log.info("ranks.alive", local_ranks=sorted(alive))
            if not alive and self._engine.state.termination.stop_requested_at is not None:
                # Before RanksSeen, which tells the core that nobody will announce and may leave it nothing to do.
                await self._recover_unannounced()
            elif not alive:
                self._clients_gone.set()
            gone = self._engine.state.alive_ranks - alive
            # What is gone at the first look after a notice may have died before it.
            await self._see_ranks(alive, ended=gone, after_notice=noticed and self._looked_since_notice)
        self._looked_since_notice = noticed
        await self._steps.take(look)

    async def _see_ranks(self, alive: frozenset[int], *, ended: frozenset[int] | None, after_notice: bool) -> None:
        """Tell the core which ranks are alive, and how others have ended: `ended`, or all of this life if None."""
        since = self._engine.state.termination.begun_at
        last = await self._run(self._live_ranks.last_steps, ended, since) if ended is None or ended else ()
        cut_short = [StepSign(at=one.at_unix, step=one.step) for one in last if one.leaving is None]
        seen = RanksSeen(
            at=self._clock.now(),
            alive=alive,
            left=any(record.leaving for record in last),
            lost_at=max((one.step for one in last if one.leaving is Leaving.LOST), default=None),
            cut_short=max(cut_short, key=lambda sign: sign.step, default=None) if after_notice else None,
        )
        await self._engine.submit(seen)

    async def look_at_disk(self) -> None:
        try:
            reading = await self._run(self._meter.measure)
        except KeepstepError as error:
            log.warning("disk.unreadable", error=str(error), hint=error.hint)
            return
        if reading.free_bytes > _ROOM_TO_KEEP_A_RESERVE * RESERVE_BYTES:
            await self._run(self._reserve.keep)
        await self._engine.submit(
            DiskRead(
                at=self._clock.now(),
                used_bytes=reading.used_bytes,
                free_bytes=reading.free_bytes,
                total_bytes=reading.total_bytes,
            )
        )

    async def admit(self, kind: Kind, size_bytes: int) -> Admission:
        """Say whether a save may begin, by a new reading of the disk. Gives pins that are being dropped a moment."""
        await self.look_at_disk()
        verdict = disk_pressure.admit(self._engine.state, kind, size_bytes)
        if verdict.admitted:
            return verdict
        with suppress(TimeoutError):
            async with asyncio.timeout(_ADMISSION_WAIT_SECONDS):
                await self._engine.until(lambda state: not state.awaits_room)
        await self.look_at_disk()
        return disk_pressure.admit(self._engine.state, kind, size_bytes)

    async def notice_termination(self, source: str, grace_seconds: float = 0.0) -> None:
        """Take a termination notice. `grace_seconds` 0 means the configured grace period."""
        now = self._clock.now()
        deadline = now + (grace_seconds or self._settings.termination.grace_seconds)
        log.warning("termination.noticed", source=source, deadline=deadline)
        # First, because every look may take long on a volume or a store that hangs.
        await self._engine.submit(TerminationNoticed(at=now, deadline=deadline, source=source))
        await self.look_at_ranks()
        say_what_is_open(self._engine.state, source, self._clock.now())
        # Wakes `watch_ranks`, which looks more often until the end.
        self.look_soon()

    async def stop(self, source: str) -> None:
        """Take a termination notice that is also for the agent, such as its own SIGTERM: it exits after the drain."""
        await self.notice_termination(source)
        await self._request_stop(trainers_gone=False)

    async def drain_after_program(
        self, *, failed_at: float | None, failed_early: bool = False, survivors_ended_well: bool = False
    ) -> None:
        """Drain and exit; the runner has waited for the program's end.

        `failed_at`: when it ended, in unix seconds, if a signal or an error ended it. `failed_early`: an error of its
        own did, soon after its start. `survivors_ended_well`: processes that outlived it then have ended well, so what
        was written after that moment is complete.

        The program may be a launcher that has left its ranks behind. They are asked to save and leave, and the drain
        begins when they have left, but no later than a grace period from now, or than an earlier notice allows.
        """
        self.program_failed = failed_at is not None
        left_behind = await self._ranks_left_behind()
        if not left_behind:
            await self._request_stop(
                trainers_gone=True,
                failed_at=failed_at,
                failed_early=failed_early,
                survivors_ended_well=survivors_ended_well,
            )
            return
        log.warning("ranks.left_behind", local_ranks=sorted(left_behind))
        # Without a deadline: unless another notice sets one, the machine stays, and the upload may take its time.
        await self._engine.submit(TerminationNoticed(at=self._clock.now(), deadline=None, source=_PROGRAM_ENDED))
        until = drain.deadline(self._engine.state)
        self._left_behind_until = (
            self._clock.now() + self._settings.termination.grace_seconds
            if until is None
            else until - self._settings.termination.commit_reserve_seconds - _DRAIN_SECONDS
        )
        say_what_is_open(self._engine.state, _PROGRAM_ENDED, self._clock.now())
        self.look_soon()

    async def _ranks_left_behind(self) -> frozenset[int]:
        """Return the ranks that are alive although the program has ended. Gives them a moment to end with it."""
        until = time.monotonic() + _LEFT_BEHIND_AFTER_SECONDS
        while True:
            await self.look_at_ranks()
            alive = self._ranks_known_alive
            if not alive or self._engine.state.termination.noticed or time.monotonic() >= until:
                return alive
            await asyncio.sleep(_ENDING_SECONDS)

    async def _drain_without_left_behind(self) -> None:
        """Drain and exit if the ranks that were left behind have left, or their time is over."""
        if self._left_behind_until is None:
            return
        alive = self._ranks_known_alive
        if alive and self._clock.now() < self._left_behind_until:
            return
        self._left_behind_until = None
        if alive:
            log.warning("ranks.given_up", local_ranks=sorted(alive))
        await self._request_stop(trainers_gone=True, failed_at=time.time() if alive else None)

    @property
    def _ranks_known_alive(self) -> frozenset[int]:
        # While the ranks are unknown, the state holds those of an earlier look.
        return frozenset() if self._unknown else self._engine.state.alive_ranks

    async def _request_stop(
        self,
        *,
        trainers_gone: bool,
        failed_at: float | None = None,
        failed_early: bool = False,
        survivors_ended_well: bool = False,
    ) -> None:
        termination = self._engine.state.termination
        if trainers_gone and termination.noticed:
            # Some may have ended while no agent looked.
            await self._see_ranks(self._engine.state.alive_ranks, ended=None, after_notice=True)
        if termination.left and termination.cut_short is None:
            # A launcher may have failed of it, but no writer has.
            failed_at, failed_early = None, False
        if self._mirror is not None:
            await self._mirror.last_looks(
                writers_gone=trainers_gone or self._clients_are_gone,
                failed_at=failed_at,
                failed_early=failed_early,
                survivors_ended_well=survivors_ended_well,
                limit_seconds=self._seconds_to_look_around(),
            )
            self.failed_early = failed_early and self._mirror.is_as_restored
        await self._recover_unannounced()
        nothing_found = ""
        # Not before the recovery: an agent that was just restarted has announced nothing yet.
        if self._mirror is not None and trainers_gone and not await self._unannounced.has_found_any():
            nothing_found = await self._mirror.nothing_found()
        await self._engine.submit(
            StopRequested(at=self._clock.now(), trainers_gone=trainers_gone, nothing_found=nothing_found)
        )

    async def _recover_unannounced(self) -> None:
        """Announce unannounced checkpoints in half of the time that is left, because they must still be sent."""
        until = drain.deadline(self._engine.state)
        left_seconds = None if until is None else max(0.0, until - self._clock.now())
        try:
            async with asyncio.timeout(None if left_seconds is None else left_seconds / 2):
                await self._unannounced.look(
                    asking_seconds=_ASKING_SECONDS if left_seconds is None else min(_ASKING_SECONDS, left_seconds / 4)
                )
        except TimeoutError:
            log.warning(
                "unannounced.cut_short",
                hint="checkpoints that were not announced stay on the volume for the next start",
            )

    @property
    def _clients_are_gone(self) -> bool:
        return self._clients_seen and not self._engine.state.alive_ranks

    def _seconds_to_look_around(self) -> float:
        """How long to look for checkpoints of a program without a client; one with a client says when it has saved."""
        state = self._engine.state
        deadline = drain.deadline(state)
        if self._clients_seen or deadline is None:
            return 0.0
        return deadline - self._clock.now() - state.settings.termination.commit_reserve_seconds - _DRAIN_SECONDS

    async def _run(self, function: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, *arguments)

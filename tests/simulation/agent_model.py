"""One agent process: the real reducer with a journal, a volume and commands that take time, fail, and outlive a crash.

Owns what the runtime owns in production: journal first, then commands, each ending in one event. A crash can come at
any boundary: before the journal is written, after it, between two commands. What was in flight may land later. While
the journal cannot be written the agent goes on from memory, without what must not run ahead of its record.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from tests.simulation.command_effects import CommandEffects, Running
from tests.simulation.invariants import AgentChecks
from tests.simulation.scenario import PlannedAgent, PlannedAnnouncement
from tests.simulation.store_model import ViolationError

from keepstep_agent.core.agent import drain, planner
from keepstep_agent.core.agent.announcements import check_announcement, known_announcement
from keepstep_agent.core.agent.commands import (
    Abandon,
    Ask,
    CancelTermination,
    CancelWork,
    Command,
    Commit,
    CreateUpload,
    Exit,
    LiftBandwidthCap,
    Prune,
    PutFile,
    PutPack,
    Recall,
    Reconcile,
    Record,
    Release,
    RequestSave,
    SendPart,
    Stage,
    WorkCommand,
    waits_for_its_record,
)
from keepstep_agent.core.agent.events import (
    Announced,
    Committed,
    DurableEvent,
    Event,
    Exited,
    Failed,
    RanksSeen,
    Shed,
    Started,
    StopRequested,
    Ticked,
    WorkCancelled,
)
from keepstep_agent.core.agent.reducer import advance, step
from keepstep_agent.core.agent.state import State
from keepstep_agent.core.agent.work import Operation, WorkId
from keepstep_agent.core.errors import ErrorKind, RequestError
from keepstep_agent.core.policies.repeated_deaths import READING, Suspect, Task, after_death, after_orderly_end
from keepstep_agent.core.settings.values import Settings
from keepstep_agent.core.stored.object_layout import marker_key
from keepstep_agent.runtime.engine.event_codec import decode_event, encode_event
from keepstep_agent.runtime.engine.journaling import rescan, save_of

if TYPE_CHECKING:
    from tests.simulation.life import Life

    from keepstep_agent.ports import StagingArea

_TIMEOUT_SECONDS = 20.0


def _is_not_in(left_out: Collection[str], save: str) -> bool:
    return save not in left_out


class AgentModel:
    """`life` is the world: clock, store, randomness, faults."""

    def __init__(self, life: "Life", index: int, planned: PlannedAgent) -> None:
        self.life = life
        self.index = index
        self.planned = planned
        self.journal: list[DurableEvent] = []
        self.starts = 0
        self.state = State(settings=self._settings())
        self.checks = AgentChecks(index)
        self._effects = CommandEffects(life, index, planned, self.checks)
        self.alive = set(range(len(planned.ranks)))
        self.running = False
        self.exit: Exit | None = None
        self.stop_requested = False
        self.journal_writable = True
        self._unjournaled: list[DurableEvent] = []
        self._in_flight: dict[WorkId, Running] = {}
        self._steps = 0
        # What the file of the note says: it outlives the process.
        self._under_way: Mapping[str, Task] = {}
        self._suspects: Mapping[str, Suspect] = {}
        self._fatal_deaths = 0
        self.were_set_aside: set[str] = set()
        self.restarting = False
        self._wake_at: float | None = None

    # --- the process -------------------------------------------------------------------------------------------

    def start(self, *, fresh: bool) -> None:
        """Replay, through the codec, look for pins that the journal does not tell of, and go on."""
        assert not self.running
        self.restarting = False
        left_out = {save for save, one in self._suspects.items() if one.is_unread}
        fatal = self.life.fatal
        if fatal is not None and fatal.save not in left_out and self._has_records(fatal.save):
            self.exit, self.stop_requested = None, False
            self._under_way = {fatal.save: Task(doing=READING, title=fatal.save)}
            if self._dies_of(fatal.save, Operation.RECALL):
                return
        self.state = self.replayed(left_out)
        for save in left_out:
            self.state.leave_unread(save)
        found = []
        may_read = partial(_is_not_in, left_out)
        for event in rescan(cast("StagingArea", self._effects), self.state, may_read):
            step(self.state, event)
            found.append(event)
        if found and not self.journal_writable:
            # It ends at once, and is started again.
            self.life.after(1.0, self._restart)
            return
        self.journal.extend(found)
        self.starts += 1
        self.checks.forget_order()
        self.running, self.exit, self.stop_requested, self._wake_at = True, None, False, None
        self.deliver(Started(at=self.life.now, fresh=fresh, suspects=self._suspects))
        self.deliver(RanksSeen(at=self.life.now, alive=frozenset(self.alive)))

    def left_out(self) -> set[str]:
        """The saves whose records were not read."""
        return set(self.state.unread)

    def replayed(self, left_out: Collection[str]) -> State:
        state = State(settings=self._settings())
        for event in self.journal:
            if (save := save_of(event)) is not None and save in left_out:
                state.leave_unread(save)
                continue
            advance(state, decode_event(encode_event(event)))
        return state

    def _settings(self) -> Settings:
        """Of the start that is on, or comes next."""
        part_sizes_bytes = self.planned.part_sizes_bytes
        part_size_bytes = part_sizes_bytes[self.starts % len(part_sizes_bytes)]
        settings = self.planned.settings
        return replace(settings, transfer=replace(settings.transfer, part_size_bytes=part_size_bytes))

    def deliver(self, event: Event) -> bool:
        """Engine and dispatcher in one. False: the process died of it, or was not there."""
        if not self.running:
            return False
        self.life.note(self.index, event)
        ready = advance(self.state, event)
        self._under_way, self._suspects = self.state.under_way(), dict(self.state.suspects)
        if ready.durable:
            if self._crashes():
                return False
            self.checks.decided(self.state, ready.durable, self.life.store)
            self._unjournaled.extend(ready.durable)
        self._write_journal()
        self.checks.commands(self.state, ready.commands)
        self.checks.nothing_overlooked(self.state)
        self.checks.newest_is_sent(self.state)
        if isinstance(event, StopRequested):
            self.stop_requested = True
        for command in ready.commands:
            if self._crashes():
                return False
            if self._unjournaled and waits_for_its_record(command):
                self.life.after(0.0, self._refuse, command.work)
            else:
                self._perform(command)
        self._check_end()
        self._plan_wake()
        return self.running

    def announce(self, planned: PlannedAnnouncement) -> bool | None:
        """As the API does: refused (False), acknowledged (True), or nobody answered (None)."""
        if not self.running:
            return None
        event = Announced(
            at=self.life.now,
            info=planned.info,
            rank=planned.rank,
            path=f"/volume/checkpoints/{planned.info.name}",
            files=planned.listed,
            local_world_size=planned.local_world_size,
        )
        try:
            check_announcement(self.state, event)
        except RequestError:
            return False
        self._effects.announced[planned.info.save, planned.rank] = planned
        if known_announcement(self.state, event) is not None:
            if not self._write_journal():
                return None
            self.checks.acknowledged(planned)
            return True
        before = len(self.journal)
        self.deliver(event)
        if event in self.journal[before:]:
            self.checks.acknowledged(planned)
            return True
        return None

    def kill(self) -> None:
        """Gone at once; what was on its way may still arrive."""
        self.running = False
        self._suspects = after_death(self._suspects, self._under_way, self.life.now)
        self.were_set_aside |= {work for work, one in self._suspects.items() if one.is_set_aside}
        self._under_way = {}
        self._unjournaled.clear()
        for running in self._in_flight.values():
            self._maybe_land_late(running)
        self._in_flight.clear()

    @property
    def idle(self) -> bool:
        return not self._in_flight

    def committing(self, save: str) -> bool:
        return WorkId(Operation.COMMIT, save) in self._in_flight

    def _dies_of(self, save: str, operation: Operation) -> bool:
        """Whether the process dies of what it does to a save. Then it is started again, whatever it was told before."""
        fatal = self.life.fatal
        is_fatal = fatal is not None and (save, operation) == (fatal.save, fatal.operation)
        if fatal is None or not is_fatal or self._fatal_deaths >= fatal.kills:
            return False
        self._fatal_deaths += 1
        stops, left = self.stop_requested, self.exit is not None
        self.kill()
        self.restarting = not left
        if self.restarting:
            self.life.after(1.0, self._start_again, stops)
        return True

    def _start_again(self, stops: bool) -> None:
        if self.running or not self.restarting:
            return
        self.start(fresh=False)
        if stops:
            if self.running:
                self.deliver(StopRequested(at=self.life.now, trainers_gone=self.life.ending))
            self.stop_requested = True

    def _has_records(self, save: str) -> bool:
        return save in self._effects.pins or any(save_of(event) == save for event in self.journal)

    def _crashes(self) -> bool:
        self._steps += 1
        if not self.life.stormy or self._steps not in self.planned.crash_steps:
            return False
        self.kill()
        self.life.after(self.life.random.uniform(0.05, 4.0), self._restart)
        return True

    def _write_journal(self) -> bool:
        """What is due; False: it cannot be written now."""
        if self._unjournaled and self.journal_writable:
            self.journal.extend(self._unjournaled)
            self.checks.journaled(self._unjournaled)
            self._unjournaled.clear()
        return not self._unjournaled

    def _restart(self) -> None:
        if not self.running and not self.life.ending:
            self.start(fresh=False)

    def _refuse(self, work: WorkId) -> None:
        self.deliver(self._effects.failed(work, ErrorKind.DISK_FULL))

    def _plan_wake(self) -> None:
        wake_at = planner.next_wake(self.state) if self.running else None
        if wake_at is not None and wake_at != self._wake_at:
            self._wake_at = wake_at
            self.life.after(wake_at - self.life.now, self._wake, wake_at)

    def _wake(self, wake_at: float) -> None:
        if self._wake_at == wake_at:
            self._wake_at = None
            self.deliver(Ticked(at=wake_at))

    def _check_end(self) -> None:
        until = drain.deadline(self.state)
        if self.stop_requested and not self.exit and until is not None and self.life.now >= until:
            raise ViolationError(f"agent {self.index} was still there at its deadline {until}")

    # --- commands ----------------------------------------------------------------------------------------------

    def _perform(self, command: Command) -> None:
        match command:
            case RequestSave() | LiftBandwidthCap() | CancelTermination():
                pass
            case Record():
                raise ViolationError("a decision came out as a command")
            case Exit():
                self._exit(command)
            case CancelWork():
                self._cancel(command.work)
            case _:
                self._begin(command)

    def _begin(self, command: WorkCommand) -> None:
        if command.work in self._in_flight:
            raise ViolationError(f"{command.work} is in flight twice")
        if (
            isinstance(command, SendPart | PutFile | PutPack | Reconcile)
            and command.work.save not in self._effects.pins
            and not self._has_marker(command.work.save)
        ):
            raise ViolationError(f"{command.work} needs pins that were dropped")
        if (
            isinstance(command, Release)
            and not self._has_marker(command.work.save)
            and not any(
                isinstance(event, Committed | Shed | Failed) and save_of(event) == command.work.save
                for event in self.journal
            )
        ):
            raise ViolationError(f"the pins of {command.work.save} went before its end was in the journal")
        faults = self.life.scenario.faults
        running = Running(command, *self._effects.fate(command))
        self._in_flight[command.work] = running
        seconds = self._effects.duration_seconds(command)
        if self.life.stormy and not isinstance(command, Stage | Recall) and self.life.random.random() < faults.hang:
            running.fails, seconds = running.fails or ErrorKind.TIMED_OUT, _TIMEOUT_SECONDS
        if isinstance(command, Commit):
            self.life.after(seconds / 2, self._look, running)
        self.life.after(seconds, self._finish, running)
        self.life.after(0.9 * seconds, self._strain, running)

    def _strain(self, running: Running) -> None:
        work = running.command.work
        if self._in_flight.get(work) is running:
            self._dies_of(work.save, work.operation)

    def _has_marker(self, save: str) -> bool:
        return marker_key(self.state.checkpoints[save].info) in self.life.store.objects

    def _cancel(self, work: WorkId) -> None:
        running = self._in_flight.get(work)
        if running is None or self.life.random.random() < self.life.scenario.faults.cancel_race:
            return
        self._maybe_land_late(running)
        self._in_flight[work] = cancelled = Running(running.command, None, takes_effect=False)
        self.life.after(0.01, self._end, cancelled, WorkCancelled(at=self.life.now, work=work))

    def _exit(self, command: Exit) -> None:
        if self.exit is not None:
            raise ViolationError("Exit was asked for twice")
        if not self.stop_requested:
            raise ViolationError("Exit was asked for although nobody stopped the agent")
        until = drain.deadline(self.state)
        if until is not None and self.life.now >= until:
            raise ViolationError("Exit came after SIGKILL")
        self.exit = command
        self.checks.exit(self.state, command, self.life.store)
        self.life.after(0.05, self._leave)

    def _leave(self) -> None:
        if self.running and self.exit is not None:
            if self._write_journal() and self.journal_writable:
                self.journal.append(Exited(at=self.life.now))
            self._under_way, self._suspects = {}, after_orderly_end(self._suspects)
            self.kill()
            self.life.left(self)

    def _end(self, running: Running, event: Event) -> None:
        work = running.command.work
        if self._in_flight.get(work) is running:
            del self._in_flight[work]
            self.deliver(event)

    def _look(self, running: Running) -> None:
        if self._in_flight.get(running.command.work) is running:
            self._effects.look(running)

    def _finish(self, running: Running) -> None:
        work = running.command.work
        if self._in_flight.get(work) is not running:
            return
        fails = running.fails
        if self.life.outage and not isinstance(running.command, Stage | Recall):
            fails, running.takes_effect = ErrorKind.UNREACHABLE, False
        refusal = self.life.refusal(running.command)
        if refusal is not None:
            fails, running.takes_effect = refusal.kind, False
        event: Event | None = None
        if running.takes_effect:
            event = self._effects.carry_out(running)
        else:
            self._maybe_land_late(running)
        if fails is not None:
            event = self._effects.failed(work, fails)
        assert event is not None
        self._end(running, event)

    def _maybe_land_late(self, running: Running) -> None:
        command, random = running.command, self.life.random
        if isinstance(command, Stage | Reconcile | Release | Abandon | Prune | Ask | Recall):
            return
        if self.life.stormy and random.random() < self.life.scenario.faults.land_late:
            self.life.late_writes[command.work.save] = self.life.late_writes.get(command.work.save, 0) + 1
            self.life.after(random.uniform(0.1, 20.0), self._land, running)

    def _land(self, running: Running) -> None:
        """A write whose sender is gone or has given it up arrives all the same."""
        command, store = running.command, self.life.store
        self.life.late_writes[command.work.save] -= 1
        match command:
            case CreateUpload():
                store.create_upload(command.key, landed_late=True)
            case Commit():
                if running.body is not None:
                    store.put_marker(command.info, running.body)
            case _:
                self._effects.carry_out(running)

    # --- what is left at the end -------------------------------------------------------------------------------

    def pinned(self) -> Iterable[str]:
        return self._effects.pins

    def acknowledged_ranks(self, save: str) -> set[int]:
        return {planned.rank for planned in self.checks.acked.get(save, {}).values()}

    def durable_view(self, state: State) -> Any:
        """What must be the same after a replay. A save that was read last is announced last, until the next start."""
        fatal = self.life.fatal.save if self.life.fatal else ""
        saves = sorted(state.checkpoints.keys() - {fatal}, key=lambda save: state.checkpoints[save].sequence)
        order = {save: position for position, save in enumerate(saves)}
        return dict(state.ranks), {
            save: (
                "open" if not checkpoint.ended else checkpoint.phase,
                order.get(save),
                checkpoint.reason,
                checkpoint.pins_dropped,
                checkpoint.manifest_stored,
                {
                    rank: (share.staged, share.files.unstored_count, share.announced.path)
                    for rank, share in checkpoint.contributions.items()
                },
            )
            for save, checkpoint in state.checkpoints.items()
        }

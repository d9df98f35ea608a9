"""A trainer's connection to its agent and to the other ranks, independent of who writes the checkpoints.

Owns this process's place in the job, the termination notice, the requests and announcements to the agent, and the exit
after a just-in-time save. Does not know how a checkpoint is written or named. After its constructor it raises
UsageError when the ranks cannot save together, and VolumeError.
"""

import logging
import math
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NoReturn

from keepstep.agent_client.client import Agent
from keepstep.agent_client.liveness import claimed, hold_liveness_lock
from keepstep.agent_client.step_file import StepFile
from keepstep.asynchronous_saves.background_writer import BackgroundWriter
from keepstep.checkpoints.records import Kind, Record, write_record
from keepstep.checkpoints.trainings import note_training
from keepstep.errors import ErrorKind, VolumeError
from keepstep.gate import Action
from keepstep.gate.sigterm import Sigterm
from keepstep.leaving import leave
from keepstep.rank_context import RankContext, init_ranks
from keepstep.ranks.coordinator import PATIENCE_SECONDS
from keepstep.ranks.spawned import outlive_parent
from keepstep.settings import Settings
from keepstep.workers import worker_processes
from keepstep_api import names, step_file

_SAVES_NOTED: Final = 8
_JUST_IN_TIME_TRIES: Final = 2
_COMING_OUT_SECONDS: Final = 10.0
_log: Final = logging.getLogger("keepstep")


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingSave:
    """A save that has an id, the same on all ranks.

    `admitted_by_agent`: the agent keeps room for it. `together`: all ranks take part in it; if not, announcing what
    some of them write is of no use.
    """

    step: int
    save: str
    kind: Kind
    admitted_by_agent: bool = False
    together: bool = True

    def key(self, about: str) -> str:
        """Return the key of an agreement about this save.

        It contains the step, because the same save id may stand for another step on another rank.
        """
        return f"{self.save}/{self.step}/{about}"


class _SaveNotes:
    """What the agent is to know of the last saves: how long training stands still for each, what is done by then."""

    def __init__(self) -> None:
        self._began_at: dict[str, float] = {}
        self._stalls_seconds: dict[str, float] = {}
        self._units: dict[str, Mapping[str, float]] = {}

    def begin(self, save: str) -> None:
        self._began_at[save] = time.monotonic()
        if len(self._began_at) > _SAVES_NOTED:
            oldest = next(iter(self._began_at))
            for notes in (self._began_at, self._stalls_seconds, self._units):
                notes.pop(oldest, None)

    def go_on(self, save: str) -> None:
        if save in self._began_at:
            self._stalls_seconds.setdefault(save, time.monotonic() - self._began_at[save])

    def count(self, save: str, units: Mapping[str, float]) -> None:
        if save in self._began_at:
            self._units[save] = units

    def stall_seconds(self, save: str) -> float:
        """Return how long it took so far; 0 when that is not known."""
        self.go_on(save)
        return self._stalls_seconds.get(save, 0.0)

    def units(self, save: str) -> Mapping[str, float]:
        return self._units.get(save, {})


class Session:
    """The connection of one process. Raises VolumeError.

    It handles SIGTERM until `close`, or after `leave` until the process ends.
    """

    def __init__(self, settings: Settings, *, rank0_only: bool = False) -> None:
        self.settings = settings
        self.stopping = False
        """Whether the just-in-time save is made, or lost twice: leave."""
        self.just_in_time_losses = 0
        """How many just-in-time saves are lost."""
        self._step = -1
        """Where training last asked what to do."""
        self._stored_step = 0
        """What the agent has or will find, without one what is in its place; else the step that training began with."""
        self._rank0_only = rank0_only
        self._asked = False
        self._left = False
        self._counter = 0
        self._notes = _SaveNotes()
        self._context: RankContext | None = None
        self._agent_knows_notice = False
        self._unannounced: tuple[Record, Path] | None = None
        # An asynchronous save is announced by another thread.
        self._announcing = threading.Lock()
        self._lock = settings.state_directory / names.RANKS_DIRECTORY / str(settings.ranks.local_rank)
        self._holds_liveness_lock = self._hold_lock()
        is_read = self._holds_liveness_lock and settings.socket is not None
        self._steps = StepFile(self._lock.with_name(f"{self._lock.name}{step_file.SUFFIX}") if is_read else None)
        worker_processes.install()
        self.agent = Agent(settings.socket, ranks=settings.ranks, holds_liveness_lock=self._holds_liveness_lock)
        # Late, so that a failure above leaves the SIGTERM handler as it was.
        self._sigterm = Sigterm(takes_interrupts=settings.in_pod)
        outlive_parent()

    def context(self) -> RankContext:
        """Return the ranks that save together. The first call waits for all of them. Raises UsageError, VolumeError."""
        if self._context is None:
            try:
                context = init_ranks(
                    self.settings,
                    self._sigterm,
                    rank0_only=self._rank0_only,
                    holds_liveness_lock=self._holds_liveness_lock,
                    grace_seconds=lambda: self.agent.seconds_to_write(0),
                )
                if context.leads_pod and self._holds_liveness_lock:
                    context.local.clean_up()
            except OSError as error:
                raise self._unusable(error) from error
            # No rank may look for checkpoints while another one still cleans up there.
            context.coordinator.agree("ready")
            self._context = context
            if self.agent.terminating:
                context.gate.notice()
        return self._context

    def action_at(self, step: int, tick: int = 0) -> Action:
        """Return what all ranks must do at this position. If the agent is back, announce what it missed."""
        action = (self._context or self.context()).gate.at(step, tick)
        self._steps.tell(step)
        self._asked, self._step = True, step
        if self._unannounced is not None and action is not Action.SAVE_AND_EXIT and self.agent.is_back():
            self.announce_missed()
        return action

    def note_stored(self, step: int) -> None:
        """Note that what training did until `step` is not lost if it leaves now: it began there, or that is stored."""
        self._stored_step = step

    def note_loss(self, kind: Kind) -> None:
        """Note on all ranks that a save is lost. After a just-in-time one, make room for another try; there is one."""
        if kind is not Kind.JUST_IN_TIME:
            return
        self.just_in_time_losses += 1
        if self.just_in_time_losses >= _JUST_IN_TIME_TRIES:
            self.stopping = True
        elif self.context().leads_pod:
            with suppress(OSError):
                self.context().local.make_room(stored=self.agent.newest_stored_save())

    def all_came_out(self) -> bool:
        """Whether all ranks come out of a save that one of them has lost: some may wait for it in the midst of it."""
        left_seconds = self.agent.seconds_to_write(0)
        seconds = _COMING_OUT_SECONDS if left_seconds is None else max(0.0, left_seconds / 2)
        return self.context().coordinator.agree(f"out/{self.next_number()}", seconds=seconds) is not None

    def request_save(self) -> None:
        """Ask all ranks to save at the next position that they can agree on."""
        self.context().gate.request_save()

    def count(self, pending: PendingSave, units: Mapping[str, float]) -> None:
        """Note what the program counts, done until this save."""
        self._notes.count(pending.save, units)

    def next_number(self) -> int:
        """Return a number that tells one joint action of the ranks from another."""
        self._counter += 1
        return self._counter

    def begin(self, step: int, kind: Kind, *, waiting: bool = True) -> PendingSave:
        """Begin a save without asking the agent or the other ranks. `waiting`: training waits for it from now on."""
        pending = PendingSave(step=step, save=f"{self.context().nonce}-c{self.next_number():06d}", kind=kind)
        if waiting:
            self._notes.begin(pending.save)
        return pending

    def goes_on(self, pending: PendingSave) -> None:
        """Note that training waits for this save no longer. Without this call it waits until the announcement."""
        self._notes.go_on(pending.save)

    def admit(self, step: int, kind: Kind, *, seconds: float = PATIENCE_SECONDS) -> PendingSave | None:
        """Ask the agents of all pods for room. Returns None when one has none. A just-in-time save is never refused."""
        pending = self.begin(step, kind)
        self.tell_notice()
        context = self.context()
        if not context.leads_pod:
            return self._agreed(pending, seconds)
        was_unreachable = self.agent.unreachable
        admission = self.agent.begin_save(step=step, kind=kind, save=pending.save)
        if admission is not None and was_unreachable and kind is not Kind.JUST_IN_TIME:
            # The agent is back, and has time for the missed checkpoint while the next one is written.
            self.announce_missed()
        refused = admission is not None and not admission.admitted
        if admission is not None and refused:
            _log.warning("save not admitted: step=%d reason=%s", step, admission.reason)
        pending = replace(pending, admitted_by_agent=admission is not None and not refused)
        return self._agreed(pending, seconds, refused=refused)

    def _agreed(self, pending: PendingSave, seconds: float, *, refused: bool = False) -> PendingSave | None:
        if pending.kind is Kind.JUST_IN_TIME:
            return pending
        admitted = self.context().coordinator.agree(pending.key("admitted"), not refused, seconds=seconds)
        if admitted:
            return pending
        self.abort(pending)
        return None if admitted is False else replace(pending, admitted_by_agent=False, together=False)

    def abort(self, pending: PendingSave) -> None:
        """Tell the agent that this save will not be announced, if the agent admitted it."""
        if pending.admitted_by_agent:
            self.agent.abort_save(pending.save)

    @contextmanager
    def claimed(self, path: Path) -> Iterator[None]:
        """While open, keep the agent's directory watch from taking up `path`: this process is about to announce it."""
        path, volume = path.resolve(), self.settings.volume.resolve()
        if not self._holds_liveness_lock or not path.is_relative_to(volume):
            yield
            return
        with claimed(self._lock, path.relative_to(volume).as_posix()):
            yield

    def announce(self, record: Record, path: Path) -> bool | None:
        """Announce a checkpoint that all ranks have written and this pod's first rank has recorded.

        Returns whether the agent has taken it over; None if none answers, which finds the record when it starts.
        """
        self.tell_notice()
        with self._announcing:
            # No other save follows a just-in-time or a final one.
            return self._announce(record, path, urgent=record.kind is not Kind.PERIODIC)

    def note_training(self, origins: Mapping[str, Path], *, ended: bool) -> None:
        """Note that a training of these output directories begins, or has ended by itself.

        `origins`: where they are, by recorded name.
        """
        context = self._context
        if context is not None and context.leads_pod:
            try:
                for output, origin in origins.items():
                    note_training(context.local.records, output, origin, ended=ended)
            except OSError as error:
                _log.warning("the training is not noted: error=%s", error)

    def announce_missed(self) -> None:
        """Announce the newest checkpoint again, if its announcement failed."""
        with self._announcing:
            if self._unannounced is not None:
                self._announce(*self._unannounced, urgent=False)

    @property
    def holds_whole_job(self) -> bool:
        """Whether every rank is in this pod, so that a checkpoint that is saved here is whole here."""
        ranks = self.context().coordinator.ranks
        return ranks.local_world_size == ranks.world_size

    @property
    def told_to_end(self) -> bool:
        """Whether this process has received SIGTERM."""
        return self._sigterm.received

    def ends_untrained(self) -> bool:
        """Return whether the pod of any rank is ending before a step was done. All ranks must leave then.

        A launcher starts ranks again that left after a just-in-time save. They have nothing to lose, and another such
        save would delay the upload of the last one.
        """
        if self._asked or self._rank0_only:
            # With rank0_only the other ranks have no session: they would not leave, but wait for this rank.
            return False
        ends = (
            self.context().coordinator.agree(f"stays/{self.next_number()}", ok=not self.context().gate.noticed) is False
        )
        if ends:
            _log.warning("the pod is ending: leaving before the first step")
        return ends

    def tell_notice(self) -> None:
        """Tell the agent once that SIGTERM has come. If the call fails, the next call of this method tries again."""
        if self._sigterm.received and not self._agent_knows_notice:
            self._agent_knows_notice = self.agent.notify_termination("client-sigterm")

    def make_time(self, writer: BackgroundWriter) -> None:
        """Before a just-in-time save: give up what `writer` is writing if the grace period does not suffice for both.

        All ranks make this call. By the rates measured so far; where there are none, it does not suffice.
        """
        flight = writer.in_flight()
        left = None
        if flight is not None:
            self.tell_notice()
            left = self.agent.seconds_to_write(flight.size_bytes * self.context().coordinator.ranks.local_world_size)
        needed = math.inf
        if flight is not None and flight.bytes_per_second:
            needed = (flight.left_bytes + flight.size_bytes) / flight.bytes_per_second
        fits = left is None or needed <= left
        if not fits:
            _log.info("no time for the save before the last one: needed_seconds=%.1f left_seconds=%.1f", needed, left)
        if self.context().coordinator.agree(f"fits/{self.next_number()}", fits) is False:
            writer.give_up("the pod ends too soon: the just-in-time save takes its place")

    def hold_sigterm(self) -> None:
        """Install the SIGTERM handler again after a framework has installed its own."""
        self._sigterm.take_again()

    def close(self, *, ended: bool = True) -> None:
        """End the session: tell the agent what it missed, and stop handling SIGTERM.

        Idempotent; does nothing after `leave`. `ended`: the training has; else it goes on unprotected.
        """
        if not self._left:
            (self._steps.end if ended else self._steps.cut_short)()
            self._end()
            self._sigterm.close()

    def leave(self, *, together: bool = True) -> NoReturn:
        """Leave for a termination notice: as `close`, but SIGTERM is ignored from then on.

        Waits for the other ranks, unless they do not leave `together`.

        Raises SystemExit: with 143 if the step that training is at is stored as far as this process knows, else with
        75. This is the one place that decides it.
        """
        is_stored = self._step <= self._stored_step
        if not self._left:
            self.stopping = True
            self._steps.leave(step_file.Leaving.LEFT if is_stored else step_file.Leaving.LOST)
            if not is_stored:
                _log.warning(
                    "leaving at step %d, which is not stored: the steps after %d are lost",
                    self._step,
                    self._stored_step,
                )
            self._end(together=together)
            self._left = True
        # Every time: on its way out, a framework may have put back the handler that it had found.
        self._sigterm.hold()
        leave(names.JUST_IN_TIME_EXIT_CODE if is_stored else names.NOT_DURABLE_EXIT_CODE)

    def _end(self, *, together: bool = True) -> None:
        self.tell_notice()
        self.announce_missed()
        if self.stopping and together:
            self.context().coordinator.leave()
        if self._context is not None:
            self._context.gate.close()
            self._context.coordinator.close()

    def _announce(self, record: Record, path: Path, *, urgent: bool) -> bool | None:
        # The world size of the ranks that write it: one pod may hold a whole checkpoint.
        ranks = replace(self.context().coordinator.ranks, world_size=record.world_size)
        # A checkpoint that is one file has no names of files. Of a name that is no text the agent says what is wrong.
        files = [file.path for file in record.files if file.path]
        if not all(map(_is_text, (*files, *record.others))):
            files = []
        announced = self.agent.announce(
            path=path,
            step=record.step,
            kind=record.kind,
            save=record.save,
            ranks=ranks,
            stall_seconds=self._notes.stall_seconds(record.save),
            units=self._notes.units(record.save),
            files=files,
            others=record.others if files else (),
            output=record.output,
            urgent=urgent,
        )
        self._unannounced = None if announced else (record, path)
        if announced and self.context().leads_pod:
            try:
                write_record(self.context().local.records, replace(record, announced=True))
            except OSError as error:
                # The record still says that it is not announced, but the agent knows the checkpoint already.
                _log.debug("announcement not recorded: name=%s error=%s", record.name, error)
        return announced

    def _hold_lock(self) -> bool:
        """Take this process's liveness lock; return whether it has it. Raises VolumeError."""
        settings = self.settings
        try:
            settings.checkpoint_directory.mkdir(parents=True, exist_ok=True)
            lives = hold_liveness_lock(self._lock)
        except (OSError, RuntimeError) as error:
            # pathlib raises RuntimeError for symbolic links that form a loop.
            raise self._unusable(error) from error
        if not lives:
            _log.warning(
                "another process of this run is alive: volume=%s hint=give each program a Checkpointer(name=…)",
                settings.volume,
            )
        return lives

    def _unusable(self, error: Exception) -> VolumeError:
        return VolumeError(
            ErrorKind.VOLUME_UNUSABLE,
            f"{self.settings.volume} cannot be written: {error}",
            hint="give a directory that this user can write, see Checkpointer(directory=…)",
        )


def _is_text(path: str) -> bool:
    """Whether a file's name is UTF-8."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True

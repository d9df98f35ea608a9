"""The agent's whole knowledge: one aggregate that only the reducer changes. Everyone else reads it.

It is mutable on purpose. A checkpoint can have ten thousand files, and we measured that copying them for every stored
part costs too much (docs/design/0002). It is pure in this sense: no I/O, no clock, and the same events give the same
state.

No event visits every checkpoint, because a store that is unavailable for a day can leave thousands of them. Code that
changes a checkpoint calls `State.reindex`, which updates the lists it belongs to and has it visited once.

`UploadRate` measures the upload rate: bytes made durable per busy second, where older seconds weigh less. Bytes become
visible only when a part is stored, and parts are stored in bursts. So time counts when bytes arrive: a wait of up to
twice the usual one does not change the rate, a longer one lowers it.
"""

import re
from bisect import bisect_left
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Final

from keepstep_agent.core.agent.checkpoint import Checkpoint, RankContribution, SetAside
from keepstep_agent.core.agent.circuit_breaker import CircuitBreaker
from keepstep_agent.core.agent.events import DiskRead, SaveBegun
from keepstep_agent.core.agent.lifecycle import LOST_PHASES
from keepstep_agent.core.agent.work import TRANSFERS, Operation, WorkId, WorkLimit, work_limit_of, work_limits
from keepstep_agent.core.errors import REFUSALS, ErrorKind
from keepstep_agent.core.file_lists import StagedFiles
from keepstep_agent.core.limits import NAME_CHARACTERS
from keepstep_agent.core.model import Kind, Phase
from keepstep_agent.core.policies.commit_news import UntoldNews
from keepstep_agent.core.policies.progress import Progress, StepSign
from keepstep_agent.core.policies.recovery_objective import SaveRequests
from keepstep_agent.core.policies.repeated_deaths import MEMORY_HINT, PRUNE, Suspect, Task
from keepstep_agent.core.settings.values import Settings

_HALF_LIFE_SECONDS: Final = 10.0
_TELLING_SECONDS: Final = 2.0


@dataclass(slots=True)
class UploadRate:
    """The measured upload rate. It is updated on every event; idle time does not count."""

    _bytes: float = 0.0
    _seconds: float = 0.0
    _waiting_seconds: float = 0.0
    _usual_wait_seconds: float = 0.0
    _last_at: float = 0.0

    def note(self, at: float, *, was_busy: bool, stored_bytes: int) -> None:
        """Move the time to `at`. `was_busy`: transfers were in flight since the last call."""
        self._waiting_seconds += max(0.0, at - self._last_at) if was_busy else 0.0
        self._last_at = at
        if stored_bytes:
            faded = _faded(self._waiting_seconds)
            self._bytes, self._seconds = self._after(self._waiting_seconds)
            self._bytes += stored_bytes
            self._usual_wait_seconds = max(self._waiting_seconds, self._usual_wait_seconds * faded)
            self._waiting_seconds = 0.0

    def forget(self) -> None:
        """Discard all measurements."""
        self._bytes = self._seconds = self._waiting_seconds = self._usual_wait_seconds = 0.0

    @property
    def bytes_per_second(self) -> float:
        """The measured rate; 0 while nothing was measured."""
        overdue_seconds = max(0.0, self._waiting_seconds - 2 * self._usual_wait_seconds)
        size_bytes, seconds = self._after(overdue_seconds)
        return size_bytes / seconds if seconds > 0 else 0.0

    @property
    def is_certain(self) -> bool:
        """Whether two seconds were measured: a few small files show only how long requests take."""
        return self._seconds >= _TELLING_SECONDS

    def _after(self, elapsed_seconds: float) -> tuple[float, float]:
        """Return the weighted bytes and seconds after more busy time in which nothing was stored."""
        faded = _faded(elapsed_seconds)
        return self._bytes * faded, self._seconds * faded + elapsed_seconds


def _faded(elapsed_seconds: float) -> float:
    return float(0.5 ** (elapsed_seconds / _HALF_LIFE_SECONDS))


@dataclass(slots=True)
class Termination:
    """What is known of the pod's end. `deadline` is unix seconds; None: no limit."""

    noticed: bool = False
    deadline: float | None = None
    source: str = ""
    # Only saves from this sequence on, and recorded since then (unix seconds), are last saves of this termination;
    # earlier ones belong to one that is over.
    first_sequence: int = 0
    begun_at: float = 0.0
    # The first sequence after the notice.
    noticed_sequence: int = 0
    # The largest number of local ranks alive at once since the notice. Each of them owes a last save.
    most_alive: int = 0
    # Of ranks that have ended since the notice: the greatest step that one has lost, the last sign of one that died.
    lost_at: int | None = None
    cut_short: StepSign | None = None
    # Whether a rank has left for the notice.
    left: bool = False
    stop_requested_at: float | None = None
    trainers_gone: bool = False
    # For people, if the agent was told to stop and found nothing of this run: true unless something is announced.
    nothing_found: str = ""
    exiting: bool = False


@dataclass(slots=True)
class Standstill:
    """Since when work fails and no checkpoint gets further (unix seconds); None while some do, or nothing failed.

    `is_refusal`: all that failed since was refused, so that waiting alone changes nothing.
    """

    since: float | None = None
    is_refusal: bool = True

    def failed(self, kind: ErrorKind, at: float) -> None:
        if self.since is None:
            self.since, self.is_refusal = at, True
        self.is_refusal &= kind in REFUSALS

    def is_over(self) -> None:
        self.since = None


@dataclass(slots=True)
class State:
    """All that the agent knows. `checkpoints` is by save id, in order of announcement."""

    settings: Settings
    now: float = 0.0
    live: bool = False
    checkpoints: dict[str, Checkpoint] = field(default_factory=dict)
    next_sequence: int = 1
    # Saves that the next follow-up visits, and the times of later visits (a heap of unix seconds and save).
    touched: dict[str, None] = field(default_factory=dict)
    timers: list[tuple[float, str]] = field(default_factory=list)
    # Checkpoints with files to send, by urgency.
    sending: list[Checkpoint] = field(default_factory=list)
    in_flight: set[WorkId] = field(default_factory=set)
    transfers: set[WorkId] = field(default_factory=set)
    cancelling: set[WorkId] = field(default_factory=set)
    work_limits: tuple[WorkLimit, ...] = field(default_factory=work_limits)
    # Transfers that were in flight when the store became unavailable, and have not ended.
    hanging: set[WorkId] = field(default_factory=set)
    # The most transfers in flight, as adapted to SlowDown; at least 1.
    window: float = 1.0
    window_cut_at: float = 0.0
    # The window before the store became unavailable; up to this size it grows fast again.
    calm_window: float = 1.0
    breaker: CircuitBreaker = field(default_factory=CircuitBreaker)
    standstill: Standstill = field(default_factory=Standstill)
    # When a checkpoint got further last (unix seconds).
    progress_at: float = 0.0
    upload_rate: UploadRate = field(default_factory=UploadRate)
    # The save of the active upload, and whether it preempted an unfinished one.
    active_upload: str = ""
    active_upload_preempted: bool = False
    termination: Termination = field(default_factory=Termination)
    # Local ranks that are alive; and local rank -> rank, as far as the ranks have registered.
    alive_ranks: frozenset[int] = frozenset()
    ranks: dict[int, int] = field(default_factory=dict)
    progress: Progress = field(default_factory=Progress)
    # The step that trainers told last, and the first sequence of the saves of that training.
    last_step: int = -1
    training_sequence: int = 0
    disk: DiskRead | None = None
    # Bytes of pins dropped since that reading, and of pins about to be dropped.
    freed_bytes: int = 0
    coming_bytes: int = 0
    # Admitted saves that are being written, by save id.
    begun: dict[str, SaveBegun] = field(default_factory=dict)
    save_requests: SaveRequests = field(default_factory=SaveRequests)
    recent_sizes_bytes: deque[int] = field(default_factory=lambda: deque(maxlen=3))
    storage_error: str = ""
    # How often the store did what it was asked, less the failures.
    answers: int = 0
    # Work that was under way when agents died, by save or by its name in `repeated_deaths`.
    suspects: dict[str, Suspect] = field(default_factory=dict)
    # Of these, the saves whose records were not read at the start; each with the sequence that it will have.
    unread: dict[str, int] = field(default_factory=dict)
    # Paths, and patterns of paths, where a trainer rewrites files in place: these files are copied, not linked.
    rewritten_paths: set[str] = field(default_factory=set)
    prune_due: bool = False
    # Counted since the start, for metrics.
    outcomes: dict[Phase, int] = field(default_factory=dict)
    failures: dict[ErrorKind, int] = field(default_factory=dict)
    stored_bytes: int = 0
    # By save id: the checkpoints that still have to become durable, oldest first; the ended ones that still have pins
    # here or uploads in the store, and those with nothing left to clean up; just-in-time saves in any phase.
    unfinished: dict[str, Checkpoint] = field(default_factory=dict)
    tidying: dict[str, Checkpoint] = field(default_factory=dict)
    settled: dict[str, Checkpoint] = field(default_factory=dict)
    # Unfinished checkpoints that are tried last.
    set_aside: dict[str, Checkpoint] = field(default_factory=dict)
    untold_news: UntoldNews = field(default_factory=UntoldNews)
    just_in_time: dict[str, Checkpoint] = field(default_factory=dict)
    # The committed checkpoint that a crash now would resume from: of the output directory that was saved to last, the
    # newest by step, then by announcement. No snapshot.
    newest_committed: Checkpoint | None = None
    # The committed snapshot that was taken last.
    newest_snapshot: Checkpoint | None = None
    # A line for each file of the output directories that no snapshot holds, and why, as of the last look.
    not_stored: tuple[str, ...] = ()
    # By output directory, the committed checkpoint that was announced last; it supersedes those announced before it
    # there. It may have a lower step than `newest_committed`, because a run may fall back to an earlier step.
    last_committed: dict[str, Checkpoint] = field(default_factory=dict)
    _in_flight_of: dict[str, set[WorkId]] = field(default_factory=dict)
    # Save -> its bytes in `coming_bytes`.
    _coming: dict[str, int] = field(default_factory=dict)
    # Path -> saves that were staged from there; the inodes that unfinished saves are links to, and of those that are
    # linked more than once, how often.
    _staged_from: dict[str, dict[str, None]] = field(default_factory=dict)
    _linked: set[int] = field(default_factory=set)
    _linked_again: dict[int, int] = field(default_factory=dict)

    def rewrites(self, path: str) -> bool:
        """Whether the trainer is known to rewrite checkpoint files of that path in place."""
        return not self.rewritten_paths.isdisjoint((path, path_pattern(path)))

    def newest(self) -> Checkpoint | None:
        """Return the last announced checkpoint that was neither shed nor failed."""
        return next((found for found in reversed(self.checkpoints.values()) if found.phase not in LOST_PHASES), None)

    def are_trainers_stuck(self, now: float) -> bool:
        """Whether the trainers tell their steps, and told none for longer than the settings allow.

        Never once a termination is noticed: they save and leave then, or wait for those that do.
        """
        timeout_seconds = self.settings.progress.step_timeout
        return not self.termination.noticed and self.progress.is_stuck(now, timeout_seconds)

    @property
    def awaits_room(self) -> bool:
        """Whether pins are about to be dropped."""
        return bool(self._coming)

    def superseded_by(self, checkpoint: Checkpoint) -> Checkpoint | None:
        """Return the committed checkpoint of its output directory, or the snapshot, that was announced last."""
        return (
            self.newest_snapshot if checkpoint.info.is_snapshot else self.last_committed.get(checkpoint.info.output_key)
        )

    def is_newest(self, checkpoint: Checkpoint) -> bool:
        """Whether it is the newest committed checkpoint, or the newest committed snapshot."""
        return checkpoint is self.newest_committed or checkpoint is self.newest_snapshot

    def in_flight_of(self, save: str) -> Collection[WorkId]:
        """Return the work in flight for one save."""
        return self._in_flight_of.get(save, ())

    def under_way(self) -> dict[str, Task]:
        """Return what is done to each work at the moment, by save or by its name in `repeated_deaths`."""
        tasks = {}
        for save, works in self._in_flight_of.items():
            checkpoint = self.checkpoints.get(save)
            title = str(checkpoint.info) if checkpoint else save
            doing = ", ".join(sorted({work.operation.value for work in works}))
            left = checkpoint.left if checkpoint else None
            tasks[save or PRUNE] = Task(doing=doing[:NAME_CHARACTERS], title=title[:NAME_CHARACTERS], left=left)
        return tasks

    def works_set_aside(self) -> dict[str, Suspect]:
        """Return the work that is tried again last, by save or by its name in `repeated_deaths`."""
        return {work: suspect for work, suspect in self.suspects.items() if suspect.is_set_aside}

    def acquit(self, work: str) -> None:
        """Count no death against this work any more."""
        self.suspects.pop(work, None)
        self.unread.pop(work, None)
        checkpoint = self.checkpoints.get(work)
        if checkpoint is not None:
            checkpoint.held_back = False
            why = checkpoint.set_aside
            if why is not None and why.work.operation is Operation.RECALL and not checkpoint.ended:
                self.put_aside(checkpoint, None)

    def leave_unread(self, save: str) -> None:
        """Keep the place of a save whose records are not read now."""
        if save not in self.unread:
            self.unread[save] = self.next_sequence
            self.next_sequence += 1

    def take_in(self, checkpoint: Checkpoint) -> None:
        """Put a checkpoint that was unread at its place among the others."""
        self.checkpoints[checkpoint.info.save] = checkpoint
        self.checkpoints = dict(sorted(self.checkpoints.items(), key=lambda known: known[1].sequence))
        for contribution in checkpoint.contributions.values():
            if contribution.staged:
                self.note_staged(checkpoint, contribution)
                path = contribution.announced.path
                order = sorted(self._staged_from[path], key=lambda save: self.checkpoints[save].sequence)
                self._staged_from[path] = dict.fromkeys(order)
        if checkpoint.ended:
            self._unlink(checkpoint)
        self.reindex(checkpoint)

    def set_aside_for(self, checkpoint: Checkpoint, suspect: Suspect) -> None:
        """Try a checkpoint last whose work was under way when agents died."""
        checkpoint.held_back = True
        work = WorkId(Operation.RECALL, checkpoint.info.save)
        why = SetAside(at=suspect.noted_at, work=work, path="", reason=f"{suspect}; {MEMORY_HINT}")
        self.put_aside(checkpoint, why)

    def staged_from(self, path: str, *, before: Checkpoint) -> Checkpoint | None:
        """Return the last known checkpoint other than `before` that was staged from exactly this path."""
        saves = reversed(self._staged_from.get(path, {}))
        return next((self.checkpoints[save] for save in saves if save != before.info.save), None)

    def may_be_linked(self, files: StagedFiles) -> bool:
        """Whether an unfinished checkpoint may be a link to one of these files. Costs the same whatever waits."""
        return not self._linked.isdisjoint(files.linked_inodes())

    def newest_sending(self) -> Checkpoint | None:
        """Return the last announced of the checkpoints with files to send; one set aside only if all are."""
        if not self.sending:
            return None
        is_ready = self.sending[-1].set_aside is None
        first, first_just_in_time = (
            bisect_left(self.sending, (is_ready, just_in_time, 0), key=_urgency) for just_in_time in (False, True)
        )
        ends = {end for end in (first_just_in_time, len(self.sending)) if end > first}
        return max((self.sending[end - 1] for end in ends), key=lambda checkpoint: checkpoint.sequence)

    def put_aside(self, checkpoint: Checkpoint, why: SetAside | None) -> None:
        """Try a checkpoint last from now on, or with None in its turn again."""
        position, is_listed = self._place_among_sending(checkpoint)
        if is_listed:
            del self.sending[position]
        checkpoint.set_aside = why
        self.reindex(checkpoint)

    def reindex(self, checkpoint: Checkpoint) -> None:
        """Update the lists that a changed checkpoint belongs to, and have the next follow-up visit it."""
        save = checkpoint.info.save
        self.touched[save] = None
        # A failed checkpoint may have been announced again.
        self.tidying.pop(save, None)
        self.settled.pop(save, None)
        if not checkpoint.ended:
            self.unfinished[save] = checkpoint
            self._note_progress(checkpoint)
        else:
            if self.unfinished.pop(save, None) is not None:
                self.standstill.is_over()
                self._unlink(checkpoint)
            (self.settled if checkpoint.settled else self.tidying)[save] = checkpoint
        if checkpoint.set_aside is not None and not checkpoint.ended:
            self.set_aside[save] = checkpoint
        else:
            self.set_aside.pop(save, None)
        if checkpoint.info.kind is Kind.JUST_IN_TIME:
            self.just_in_time[save] = checkpoint
        self.coming_bytes -= self._coming.pop(save, 0)
        if checkpoint.returns_room:
            self._coming[save] = checkpoint.size_bytes
            self.coming_bytes += checkpoint.size_bytes
        if checkpoint.durable:
            self._note_durable(checkpoint)
        position, is_listed = self._place_among_sending(checkpoint)
        if checkpoint.sends and not is_listed:
            self.sending.insert(position, checkpoint)
        elif is_listed and not checkpoint.sends:
            del self.sending[position]

    def _place_among_sending(self, checkpoint: Checkpoint) -> tuple[int, bool]:
        """Return where a checkpoint is among those with files to send, or would be, and whether it is one."""
        position = bisect_left(self.sending, checkpoint.urgency, key=_urgency)
        return position, position < len(self.sending) and self.sending[position] is checkpoint

    def _note_progress(self, checkpoint: Checkpoint) -> None:
        """End a standstill if the checkpoint has got further than ever. One that is begun again and again has not."""
        left = checkpoint.left
        if checkpoint.least_left is None or left < checkpoint.least_left:
            checkpoint.least_left = left
            self.standstill.is_over()
            self.progress_at = self.now

    def _note_durable(self, checkpoint: Checkpoint) -> None:
        last = self.superseded_by(checkpoint)
        is_last = last is None or checkpoint.sequence > last.sequence
        if checkpoint.info.is_snapshot:
            self.newest_snapshot = checkpoint if is_last else last
            return
        if is_last:
            self.last_committed[checkpoint.info.output_key] = checkpoint
        newest = self.newest_committed
        if newest is None or newest.info.output_key != checkpoint.info.output_key:
            is_newest = newest is None or checkpoint.sequence > newest.sequence
        else:
            is_newest = (checkpoint.info.step, checkpoint.sequence) > (newest.info.step, newest.sequence)
        if is_newest:
            self.newest_committed = checkpoint

    def forget(self, checkpoint: Checkpoint) -> None:
        """Remove a settled checkpoint from the state."""
        save = checkpoint.info.save
        del self.checkpoints[save], self.settled[save]
        self.just_in_time.pop(save, None)
        self.acquit(save)
        for contribution in checkpoint.contributions.values():
            saves = self._staged_from.get(contribution.announced.path, {})
            saves.pop(save, None)
            if not saves:
                self._staged_from.pop(contribution.announced.path, None)

    def note_staged(self, checkpoint: Checkpoint, contribution: RankContribution) -> None:
        """Index the path and the linked inodes of a contribution whose files are pinned."""
        save = checkpoint.info.save
        saves = self._staged_from.setdefault(contribution.announced.path, {})
        saves.pop(save, None)
        saves[save] = None
        for inode in contribution.files.pinned.linked_inodes():
            if inode in self._linked:
                self._linked_again[inode] = self._linked_again.get(inode, 0) + 1
            self._linked.add(inode)

    def _unlink(self, checkpoint: Checkpoint) -> None:
        for contribution in checkpoint.contributions.values():
            for inode in contribution.files.pinned.linked_inodes():
                again = self._linked_again.pop(inode, 0)
                if again == 0:
                    self._linked.discard(inode)
                elif again > 1:
                    self._linked_again[inode] = again - 1

    def delay(self, checkpoint: Checkpoint, work: WorkId, until: float) -> None:
        """Hold `work` back until then (unix seconds), when the checkpoint is visited again."""
        checkpoint.delayed[work] = until
        heappush(self.timers, (until, checkpoint.info.save))

    def advance_to(self, now: float) -> None:
        """Set the time, and have the follow-up visit the checkpoints whose timers are due."""
        self.now = now
        while self.timers and self.timers[0][0] <= now:
            _, save = heappop(self.timers)
            self.touched[save] = None

    def launch(self, work: WorkId) -> None:
        if work.operation is not Operation.ASK:
            self.breaker.begins(work, self.now, ending=self.termination.noticed)
        self.in_flight.add(work)
        self._in_flight_of.setdefault(work.save, set()).add(work)
        if work.operation in TRANSFERS:
            self.transfers.add(work)
        sort = work_limit_of(self.work_limits, work)
        if sort is not None:
            sort.busy += 1

    def land(self, work: WorkId) -> bool:
        """Take the work out of flight. Returns False if it was not in flight (an answer from before a restart)."""
        if work not in self.in_flight:
            return False
        self.in_flight.discard(work)
        self.cancelling.discard(work)
        self.hanging.discard(work)
        self.transfers.discard(work)
        of_save = self._in_flight_of[work.save]
        of_save.discard(work)
        if not of_save:
            del self._in_flight_of[work.save]
        sort = work_limit_of(self.work_limits, work)
        if sort is not None:
            sort.busy -= 1
        return True

    def forget_work(self) -> None:
        """Forget all work in flight: the process that did it has ended."""
        for works in (self.in_flight, self.transfers, self.cancelling, self.hanging):
            works.clear()
        self._in_flight_of.clear()
        self.work_limits = work_limits()


def path_pattern(path: str) -> str:
    """Return the pattern of a path: paths that differ only in their numbers have the same."""
    return re.sub(r"[0-9]+", "#", path)


def _urgency(checkpoint: Checkpoint) -> tuple[bool, bool, int]:
    return checkpoint.urgency

"""The agent's whole knowledge: one aggregate that only the reducer changes, and everyone else reads.

It is mutable on purpose: a checkpoint can have ten thousand files, and copying them for every part that lands is the
one cost of immutability we measured and did not want (docs/design/0002). Purity here means: no I/O, no clock, and the
same events give the same state.

Nor does an event look at every checkpoint: a store that is away for a day can leave thousands of them. Whoever changes
a checkpoint reindexes it (`State.reindex`): that keeps the lists it belongs to, and has it looked at once.

Measured upload rate: bytes made durable per second of being busy, with old seconds fading out.

Bytes show only when a part lands, and parts land in bursts, so time counts when bytes come: a wait no longer than
twice the usual one says nothing yet, a longer one lowers the rate.
"""

import re
from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Iterable, Reversible
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Final

from mooring_agent.core.agent.checkpoint import Checkpoint, FileProgress, RankContribution
from mooring_agent.core.agent.circuit_breaker import CircuitBreaker
from mooring_agent.core.agent.events import DiskRead, SaveBegun
from mooring_agent.core.agent.work import TRANSFERS, WorkId, WorkLimit, work_limit_of, work_limits
from mooring_agent.core.errors import ErrorKind
from mooring_agent.core.model import (
    Kind,
    Phase,
)
from mooring_agent.core.settings.values import Settings

_HALF_LIFE_SECONDS: Final = 10.0
_TELLING_SECONDS: Final = 2.0


@dataclass(slots=True)
class UploadRate:
    """Updated on every event; idle time does not count."""

    _bytes: float = 0.0
    _seconds: float = 0.0
    _waiting_seconds: float = 0.0
    _usual_wait_seconds: float = 0.0
    _last_at: float = 0.0

    def note(self, at: float, *, was_busy: bool, stored_bytes: int) -> None:
        """Time has moved to `at`; `was_busy`: something was on the wire since the last call."""
        self._waiting_seconds += max(0.0, at - self._last_at) if was_busy else 0.0
        self._last_at = at
        if stored_bytes:
            faded = _faded(self._waiting_seconds)
            self._bytes, self._seconds = self._after(self._waiting_seconds)
            self._bytes += stored_bytes
            self._usual_wait_seconds = max(self._waiting_seconds, self._usual_wait_seconds * faded)
            self._waiting_seconds = 0.0

    def forget(self) -> None:
        """What was measured holds no longer."""
        self._bytes = self._seconds = self._waiting_seconds = self._usual_wait_seconds = 0.0

    @property
    def bytes_per_second(self) -> float:
        """0 while nothing was measured."""
        overdue_seconds = max(0.0, self._waiting_seconds - 2 * self._usual_wait_seconds)
        size_bytes, seconds = self._after(overdue_seconds)
        return size_bytes / seconds if seconds > 0 else 0.0

    @property
    def wire_bytes_per_second(self) -> float:
        """The same once it says something of the wire, else 0: a few small files tell how long requests take."""
        return self.bytes_per_second if self._seconds >= _TELLING_SECONDS else 0.0

    def _after(self, elapsed_seconds: float) -> tuple[float, float]:
        """Bytes and seconds after more busy time in which nothing landed."""
        faded = _faded(elapsed_seconds)
        return self._bytes * faded, self._seconds * faded + elapsed_seconds


def _faded(elapsed_seconds: float) -> float:
    return float(0.5 ** (elapsed_seconds / _HALF_LIFE_SECONDS))


@dataclass(slots=True)
class Termination:
    """What we know of the end. `deadline` in unix seconds, None: no limit."""

    noticed: bool = False
    deadline: float | None = None
    source: str = ""
    # Only a save from here on is the last one of this end: a pod that was spared may end again.
    first_sequence: int = 0
    # Most local ranks that were alive at a time since the notice: each of them owes a last save.
    most_alive: int = 0
    stop_requested_at: float | None = None
    trainers_gone: bool = False
    exiting: bool = False


@dataclass(slots=True)
class State:
    """Everything. `checkpoints` is by save id, in order of announcement."""

    settings: Settings
    now: float = 0.0
    live: bool = False
    checkpoints: dict[str, Checkpoint] = field(default_factory=dict)
    next_sequence: int = 1
    # Saves to be looked at in the next follow-up, and when others are (unix seconds, a heap).
    touched: dict[str, None] = field(default_factory=dict)
    timers: list[tuple[float, str]] = field(default_factory=list)
    # Those with something to send, by urgency.
    sending: list[Checkpoint] = field(default_factory=list)
    in_flight: set[WorkId] = field(default_factory=set)
    transfers: set[WorkId] = field(default_factory=set)
    cancelling: set[WorkId] = field(default_factory=set)
    work_limits: tuple[WorkLimit, ...] = field(default_factory=work_limits)
    # Transfers that were on the wire when the store went away, and have not ended.
    hanging: set[WorkId] = field(default_factory=set)
    # Parts on the wire at most, as adapted to SlowDown; at least 1.
    window: float = 1.0
    window_cut_at: float = 0.0
    # What the window was before the store went away; up to there it opens fast again.
    calm_window: float = 1.0
    breaker: CircuitBreaker = field(default_factory=CircuitBreaker)
    upload_rate: UploadRate = field(default_factory=UploadRate)
    # The save that has the wire, and whether it pushed an unfinished one aside to get it.
    active_upload: str = ""
    active_upload_preempted: bool = False
    termination: Termination = field(default_factory=Termination)
    # Local ranks that are alive; and which rank of the job each local rank is, of those that have said so.
    alive_ranks: frozenset[int] = frozenset()
    ranks: dict[int, int] = field(default_factory=dict)
    disk: DiskRead | None = None
    # Pins dropped since that reading, and those about to be dropped: room that it does not show.
    freed_bytes: int = 0
    coming_bytes: int = 0
    # Saves that were given leave and are being written, by save id.
    begun: dict[str, SaveBegun] = field(default_factory=dict)
    recent_sizes_bytes: deque[int] = field(default_factory=lambda: deque(maxlen=3))
    storage_error: str = ""
    # Where a trainer rewrites files in place, and patterns of such paths: what comes from there is copied, not linked.
    rewritten_paths: set[str] = field(default_factory=set)
    prune_due: bool = False
    # Counted since the start, for metrics.
    outcomes: dict[Phase, int] = field(default_factory=dict)
    failures: dict[ErrorKind, int] = field(default_factory=dict)
    stored_bytes: int = 0
    _in_flight_of: dict[str, set[WorkId]] = field(default_factory=dict)
    _unfinished: dict[str, Checkpoint] = field(default_factory=dict)
    _tidying: dict[str, Checkpoint] = field(default_factory=dict)
    _settled: dict[str, Checkpoint] = field(default_factory=dict)
    _just_in_time: dict[str, Checkpoint] = field(default_factory=dict)
    # Save -> bytes, of `coming_bytes`.
    _coming: dict[str, int] = field(default_factory=dict)
    # Path -> saves that were staged from there; inode -> files of unfinished saves that are links to it.
    _staged_from: dict[str, dict[str, None]] = field(default_factory=dict)
    _links: dict[int, dict[tuple[str, str], FileProgress]] = field(default_factory=dict)
    _newest_committed: Checkpoint | None = None
    _last_announced_committed: Checkpoint | None = None

    def rewrites(self, source: str) -> bool:
        """Whether the trainer is known to write to the files of checkpoints from that path again."""
        return not self.rewritten_paths.isdisjoint((source, path_pattern(source)))

    def newest(self) -> Checkpoint | None:
        """The newest announced that has not failed, whatever became of it."""
        over = (Phase.FAILED, Phase.SHED)
        return next((found for found in reversed(self.checkpoints.values()) if found.phase not in over), None)

    def newest_committed(self) -> Checkpoint | None:
        """By step, then by announcement: what a crash now would resume from."""
        return self._newest_committed

    def last_announced_committed(self) -> Checkpoint | None:
        """It supersedes what was announced before it; a run that fell back to an earlier step commits lower ones."""
        return self._last_announced_committed

    def unfinished(self) -> Reversible[Checkpoint]:
        """What still has to become durable, oldest first."""
        return self._unfinished.values()

    def tidying(self) -> Iterable[Checkpoint]:
        """What is over and has left something: pins here, or uploads in the store."""
        return self._tidying.values()

    def settled(self) -> Iterable[Checkpoint]:
        """What is over for good and still known."""
        return self._settled.values()

    def just_in_time(self) -> Iterable[Checkpoint]:
        """All just-in-time saves that are known, whatever became of them."""
        return self._just_in_time.values()

    @property
    def awaits_room(self) -> bool:
        """Pins are about to be dropped."""
        return bool(self._coming)

    def in_flight_of(self, save: str) -> Collection[WorkId]:
        """All that is under way for one save."""
        return self._in_flight_of.get(save, ())

    def staged_from(self, source: str, *, before: Checkpoint) -> Checkpoint | None:
        """The last known checkpoint but `before` itself that was staged from that very path."""
        saves = reversed(self._staged_from.get(source, {}))
        return next((self.checkpoints[save] for save in saves if save != before.info.save), None)

    def links_to(self, inode: int) -> Iterable[tuple[str, FileProgress]]:
        """Files, with their saves, of what still has to become durable that are links to that inode."""
        return ((save, progress) for (save, _), progress in self._links.get(inode, {}).items())

    def newest_sending(self) -> Checkpoint | None:
        """The last announced of those with something to send."""
        first_just_in_time = bisect_left(self.sending, (True, 0), key=_urgency)
        newest = [self.sending[position - 1] for position in {first_just_in_time, len(self.sending)} if position]
        return max(newest, key=lambda checkpoint: checkpoint.sequence, default=None)

    def reindex(self, checkpoint: Checkpoint) -> None:
        """Put a checkpoint that has changed where it belongs, and have it looked at."""
        save = checkpoint.info.save
        self.touched[save] = None
        # One that had failed may have been announced again.
        self._tidying.pop(save, None)
        self._settled.pop(save, None)
        if not checkpoint.ended:
            self._unfinished[save] = checkpoint
        else:
            if self._unfinished.pop(save, None) is not None:
                self._unlink(checkpoint)
            (self._settled if checkpoint.settled else self._tidying)[save] = checkpoint
        if checkpoint.info.kind is Kind.JUST_IN_TIME:
            self._just_in_time[save] = checkpoint
        self.coming_bytes -= self._coming.pop(save, 0)
        if checkpoint.returns_room:
            self._coming[save] = checkpoint.size_bytes
            self.coming_bytes += checkpoint.size_bytes
        newest = self._newest_committed
        rank = (checkpoint.info.step, checkpoint.sequence)
        if checkpoint.durable and (newest is None or rank > (newest.info.step, newest.sequence)):
            self._newest_committed = checkpoint
        last = self._last_announced_committed
        if checkpoint.durable and (last is None or checkpoint.sequence > last.sequence):
            self._last_announced_committed = checkpoint
        position = bisect_left(self.sending, checkpoint.urgency, key=_urgency)
        is_listed = position < len(self.sending) and self.sending[position] is checkpoint
        if checkpoint.sends and not is_listed:
            self.sending.insert(position, checkpoint)
        elif is_listed and not checkpoint.sends:
            del self.sending[position]

    def forget(self, checkpoint: Checkpoint) -> None:
        """An ended one is known no more."""
        save = checkpoint.info.save
        del self.checkpoints[save], self._settled[save]
        self._just_in_time.pop(save, None)
        for contribution in checkpoint.contributions.values():
            saves = self._staged_from.get(contribution.source, {})
            saves.pop(save, None)
            if not saves:
                self._staged_from.pop(contribution.source, None)

    def link(self, checkpoint: Checkpoint, contribution: RankContribution) -> None:
        """A contribution's files are pinned."""
        save = checkpoint.info.save
        saves = self._staged_from.setdefault(contribution.source, {})
        saves.pop(save, None)
        saves[save] = None
        for progress in contribution.linked_files():
            self._links.setdefault(progress.file.fingerprint.inode, {})[save, progress.file.path] = progress

    def _unlink(self, checkpoint: Checkpoint) -> None:
        for contribution in checkpoint.contributions.values():
            for progress in contribution.linked_files():
                inode = progress.file.fingerprint.inode
                links = self._links.get(inode, {})
                links.pop((checkpoint.info.save, progress.file.path), None)
                if not links:
                    self._links.pop(inode, None)

    def delay(self, checkpoint: Checkpoint, work: WorkId, until: float) -> None:
        """Not before then; the checkpoint is looked at again in time."""
        checkpoint.delayed[work] = until
        heappush(self.timers, (until, checkpoint.info.save))

    def advance_to(self, now: float) -> None:
        """Time has passed: what waited for it is looked at."""
        self.now = now
        while self.timers and self.timers[0][0] <= now:
            _, save = heappop(self.timers)
            self.touched[save] = None

    def launch(self, work: WorkId) -> None:
        self.breaker.begins(work, self.now, ending=self.termination.noticed)
        self.in_flight.add(work)
        self._in_flight_of.setdefault(work.save, set()).add(work)
        if work.operation in TRANSFERS:
            self.transfers.add(work)
        sort = work_limit_of(self.work_limits, work)
        if sort is not None:
            sort.busy += 1

    def land(self, work: WorkId) -> bool:
        """The work is no longer in flight; False if it was not (an answer from before a restart)."""
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
        """What was under way is gone with the process that did it."""
        for works in (self.in_flight, self.transfers, self.cancelling, self.hanging):
            works.clear()
        self._in_flight_of.clear()
        self.work_limits = work_limits()


def path_pattern(source: str) -> str:
    """The same for the paths of a series, which differ in their numbers alone."""
    return re.sub(r"[0-9]+", "#", source)


def _urgency(checkpoint: Checkpoint) -> tuple[bool, int]:
    return checkpoint.urgency

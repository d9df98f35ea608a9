"""The agent's whole knowledge: one aggregate that only the reducer changes, and everyone else reads.

It is mutable on purpose: a checkpoint can have ten thousand files, and copying them for every part that lands is the
one cost of immutability we measured and did not want (docs/design/0002). Purity here means: no I/O, no clock, and the
same events give the same state.

Nor does an event look at every checkpoint: a store that is away for a day can leave thousands of them. Whoever changes
a checkpoint files it (`State.file`): that keeps the lists it belongs to, and has it looked at once.
"""

import re
from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Reversible
from dataclasses import dataclass, field
from heapq import heappop, heappush

from mooring_agent.core import lifecycle
from mooring_agent.core.errands import Errands, errands, errands_of
from mooring_agent.core.errors import ErrorKind
from mooring_agent.core.events import DiskRead, SaveBegun
from mooring_agent.core.goodput import Goodput
from mooring_agent.core.lifecycle import Trigger
from mooring_agent.core.model import (
    AnnouncementTime,
    FileEntry,
    Kind,
    Pack,
    PackPlace,
    Part,
    Phase,
    RankManifest,
    SaveInfo,
    StagedFile,
)
from mooring_agent.core.settings import Settings
from mooring_agent.core.store_trouble import StoreTrouble
from mooring_agent.core.work import TRANSFERS, WorkId


@dataclass(slots=True)
class FileProgress:
    """How far one file has come. `parts` is the plan; a file with at most one part is sent whole."""

    file: StagedFile
    part_size_bytes: int
    parts: tuple[Part, ...]
    upload_id: str = ""
    etags: dict[int, str] = field(default_factory=dict)
    checksums: dict[int, int] = field(default_factory=dict)
    stored: bool = False
    # Of what is packed: it is sent with its pack.
    place: PackPlace | None = None

    @property
    def whole(self) -> bool:
        """Sent by a single PUT."""
        return len(self.parts) <= 1

    @property
    def durable_bytes(self) -> int:
        if self.stored:
            return self.file.size_bytes
        return sum(self.parts[number - 1].size_bytes for number in self.etags)

    def entry(self) -> FileEntry:
        return FileEntry(
            path=self.file.path,
            size_bytes=self.file.size_bytes,
            part_size_bytes=self.part_size_bytes,
            checksums=tuple(self.checksums[part.number] for part in self.parts),
            place=self.place,
        )


@dataclass(slots=True)
class PackProgress:
    """A pack is stored, with all its files, or it is not."""

    pack: Pack
    stored: bool = False


@dataclass(slots=True)
class Share:
    """What one local rank contributes to a save."""

    rank: int
    source: str
    requested_files: tuple[str, ...]
    announced_at: float
    local_world_size: int
    signature: str
    save_made_here: bool = False
    recorded_at: float | None = None
    staged: bool = False
    files: dict[str, FileProgress] = field(default_factory=dict)
    packs: list[PackProgress] = field(default_factory=list)
    unstored_count: int = 0
    manifest_stored: bool = False

    @property
    def announcement_time(self) -> AnnouncementTime:
        return AnnouncementTime(at=self.announced_at, recorded_at=self.recorded_at)

    def linked_files(self) -> Iterator[FileProgress]:
        """Those that share their inode with the trainer's."""
        return (progress for progress in self.files.values() if not progress.file.private)


@dataclass(slots=True)
class Checkpoint:
    """One save of one checkpoint as this agent sees it. `sequence` is the order of announcement: newest is highest."""

    info: SaveInfo
    sequence: int
    announced_at: float
    phase: Phase = Phase.ANNOUNCED
    shares: dict[int, Share] = field(default_factory=dict)
    size_bytes: int = 0
    durable_bytes: int = 0
    file_count: int = 0
    # Transfers ready to go, and those that wait for their retry (work -> unix seconds).
    pending: deque[WorkId] = field(default_factory=deque)
    delayed: dict[WorkId, float] = field(default_factory=dict)
    attempts: dict[WorkId, int] = field(default_factory=dict)
    # False after a restart until the store was asked what it really has.
    reconciled: bool = True
    # A multipart upload may exist that we do not know of.
    may_have_orphans: bool = False
    # Since when every manifest but the marker is there; another agent may be about to write it.
    marker_due_at: float | None = None
    # The last look found ranks of other agents without manifest.
    waits_for_ranks: bool = False
    committed_at: float = 0.0
    pins_dropped: bool = False
    uploads_aborted: bool = False
    error_kind: ErrorKind | None = None
    reason: str = ""
    hint: str = ""

    def move(self, trigger: Trigger) -> None:
        self.phase = lifecycle.advance(self.phase, trigger)

    @property
    def ended(self) -> bool:
        """Nothing is left to upload or commit."""
        return self.phase in lifecycle.ENDED_PHASES

    @property
    def durable(self) -> bool:
        return self.phase in lifecycle.DURABLE_PHASES

    @property
    def begins_anew(self) -> bool:
        """It failed before anything of it was pinned: another announcement is another try."""
        return self.phase is Phase.FAILED and not any(share.staged for share in self.shares.values())

    @property
    def settled(self) -> bool:
        """Over, and nothing of it is left to clean up, here or in the store."""
        return self.ended and self.pins_dropped and (self.durable or self.uploads_aborted)

    @property
    def returns_room(self) -> bool:
        """Its pins are about to be dropped, with nothing to wait for."""
        return self.phase in (Phase.SHED, Phase.COMMITTED) and not self.pins_dropped

    @property
    def sends(self) -> bool:
        """It has a place in the queue for the wire."""
        return (
            self.phase in (Phase.STAGED, Phase.UPLOADING)
            and self.reconciled
            and any(share.unstored_count for share in self.shares.values())
        )

    @property
    def urgency(self) -> tuple[bool, int]:
        """The more important sorts higher: just-in-time above all, then the newer."""
        return self.info.kind is Kind.JUST_IN_TIME, self.sequence

    @property
    def remaining_bytes(self) -> int:
        return self.size_bytes - self.durable_bytes

    @property
    def expected_local_ranks(self) -> int:
        """How many ranks will announce this save here, as far as they have said."""
        return max([len(self.shares), *(share.local_world_size for share in self.shares.values())])

    @property
    def all_sealed(self) -> bool:
        return len(self.shares) >= self.expected_local_ranks and all(
            share.manifest_stored for share in self.shares.values()
        )

    def manifest(self, rank: int) -> RankManifest:
        share = self.shares[rank]
        return RankManifest(
            info=self.info,
            rank=rank,
            saved_at=share.announced_at,
            files=tuple(share.files[path].entry() for path in sorted(share.files)),
            single_file=any(progress.file.announced for progress in share.files.values()),
            pack_sizes_bytes=tuple(progress.pack.size_bytes for progress in share.packs),
        )


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
    errands: tuple[Errands, ...] = field(default_factory=errands)
    # Transfers that were on the wire when the store went away, and have not ended.
    hanging: set[WorkId] = field(default_factory=set)
    # Parts on the wire at most, as adapted to SlowDown; at least 1.
    window: float = 1.0
    window_cut_at: float = 0.0
    # What the window was before the store went away; up to there it opens fast again.
    calm_window: float = 1.0
    trouble: StoreTrouble = field(default_factory=StoreTrouble)
    goodput: Goodput = field(default_factory=Goodput)
    # The save that has the wire, and whether it pushed an unfinished one aside to get it.
    leader: str = ""
    leader_preempted: bool = False
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

    def file(self, checkpoint: Checkpoint) -> None:
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
        for share in checkpoint.shares.values():
            saves = self._staged_from.get(share.source, {})
            saves.pop(save, None)
            if not saves:
                self._staged_from.pop(share.source, None)

    def link(self, checkpoint: Checkpoint, share: Share) -> None:
        """A share's files are pinned."""
        save = checkpoint.info.save
        saves = self._staged_from.setdefault(share.source, {})
        saves.pop(save, None)
        saves[save] = None
        for progress in share.linked_files():
            self._links.setdefault(progress.file.fingerprint.inode, {})[save, progress.file.path] = progress

    def _unlink(self, checkpoint: Checkpoint) -> None:
        for share in checkpoint.shares.values():
            for progress in share.linked_files():
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
        self.trouble.begins(work, self.now, ending=self.termination.noticed)
        self.in_flight.add(work)
        self._in_flight_of.setdefault(work.save, set()).add(work)
        if work.operation in TRANSFERS:
            self.transfers.add(work)
        sort = errands_of(self.errands, work)
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
        sort = errands_of(self.errands, work)
        if sort is not None:
            sort.busy -= 1
        return True

    def forget_work(self) -> None:
        """What was under way is gone with the process that did it."""
        for works in (self.in_flight, self.transfers, self.cancelling, self.hanging):
            works.clear()
        self._in_flight_of.clear()
        self.errands = errands()


def path_pattern(source: str) -> str:
    """The same for the paths of a series, which differ in their numbers alone."""
    return re.sub(r"[0-9]+", "#", source)


def _urgency(checkpoint: Checkpoint) -> tuple[bool, int]:
    return checkpoint.urgency

"""Everything that can happen to the agent. Events carry their time and any generated id; the core invents neither.

The classes in `DURABLE` are journaled before they take effect, and suffice to rebuild the state after a crash.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from keepstep_agent.core.agent.work import WorkId
from keepstep_agent.core.errors import ErrorKind
from keepstep_agent.core.file_lists import SnapshotContent, StagedFiles
from keepstep_agent.core.limits import FileNames, LocalRank, LocalRanks, OtherNames, Rank
from keepstep_agent.core.model import CommitNews, Receiver, SaveInfo
from keepstep_agent.core.policies.progress import StepSign
from keepstep_agent.core.policies.repeated_deaths import Suspect


@dataclass(frozen=True, slots=True, kw_only=True)
class _Happened:
    """Something happened `at` that moment, in unix seconds."""

    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Started(_Happened):
    """The agent has started and replayed its journal. `fresh`: the pod is new, so old termination notices are void.

    `suspects`: the work that was under way when the agents before this one died.
    """

    fresh: bool
    suspects: Mapping[str, Suspect] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkEnded(_Happened):
    """A piece of work has ended."""

    work: WorkId


@dataclass(frozen=True, slots=True, kw_only=True)
class Announced(_Happened):
    """A rank's part of a checkpoint is complete on disk.

    `files` empty: everything below `path`. `others`: files of the program's own that it may write to again; only with
    `files`, and none of these. `local_world_size` > 1: other ranks share the directory and list the same `files`, and
    the agent waits for all of them; of the `others`, those of the lowest rank count. `signature` is that of the files
    when the rank announced them: the agent stages only content that a rank of the directory has announced.
    `save_made_here`: the agent made the save id, and tells repeated announcements by their content. `recorded_at`: when
    the client recorded the checkpoint, if the agent found that record and no client announced it here. `snapshot`: what
    a snapshot consists of; only the agent makes these. `begun_at`: when its trainer was admitted to write it, in unix
    seconds; None if it did not ask. `stall_seconds`: how long training stood still for it; 0: not known. `units`: what
    the program counts, done until then.
    """

    info: SaveInfo
    rank: Rank
    path: str
    files: FileNames
    local_world_size: LocalRanks
    signature: str = ""
    save_made_here: bool = False
    recorded_at: float | None = None
    snapshot: SnapshotContent | None = None
    begun_at: float | None = None
    stall_seconds: float = 0.0
    units: tuple[tuple[str, float], ...] = ()
    others: OtherNames = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged(WorkEnded):
    """A rank's files are pinned; the trainer may delete its own.

    `part_size_bytes` and `pack_size_bytes` are the sizes preferred at the time. Later events number parts and packs by
    them, whatever is set later. `pack_size_bytes` is 0 if nothing is packed.
    """

    files: StagedFiles
    part_size_bytes: int
    pack_size_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadCreated(WorkEnded):
    upload: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PartStored(WorkEnded):
    receipt: str
    checksum: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FileStored(WorkEnded):
    """An object is durable. `checksum` is None if the parts' checksums are known already, or the file is empty."""

    checksum: int | None
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PackStored(WorkEnded):
    """A pack is durable.

    `checksums` has one for each of its files, in order; that of an empty file means nothing. `size_bytes` is the sum of
    the files.
    """

    checksums: tuple[int, ...]
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SentChecked(WorkEnded):
    """What was sent of a rank is still what its pins hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestStored(WorkEnded):
    """The manifest of this agent's ranks is durable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundUpload:
    """A multipart upload as the store has it. `parts` are certainly ours, as (number, receipt, checksum)."""

    rank: int
    path: str
    upload: str
    parts: tuple[tuple[int, str, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundFile:
    """An object that is already stored whole. `checksum` as in FileStored."""

    rank: int
    path: str
    checksum: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconciled(WorkEnded):
    """What the store really has of a save, after a restart. Everything that is not named here is sent again."""

    uploads: tuple[FoundUpload, ...]
    files: tuple[FoundFile, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectsLost(WorkEnded):
    """The listing lacks objects of ours, or shows them with another size.

    `files` are (rank, path) pairs, `packs` (rank, number) pairs. Our manifest is always written again.
    """

    files: tuple[tuple[int, str], ...] = ()
    packs: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitWaits(WorkEnded):
    """Our ranks are sealed, and the marker is not there.

    `missing_ranks`: so many ranks still lack their manifest or files. 0: another agent may be about to write the
    marker. None: this try has not listed the save.
    """

    missing_ranks: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed(WorkEnded):
    """The marker exists and was read back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Abandoned(WorkEnded):
    """No multipart upload of a given-up save is left in the store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Released(WorkEnded):
    """The pins of a save are dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shed(_Happened):
    """The core decided to give up a superseded checkpoint."""

    save: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed(_Happened):
    """The core decided that a checkpoint cannot become durable. What is on disk stays there."""

    save: str
    kind: ErrorKind
    reason: str
    hint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NewsDue(_Happened):
    """The core decided to tell these receivers of a commit."""

    news: CommitNews
    receivers: tuple[Receiver, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NewsTaken(_Happened):
    """A receiver has taken the news of a save."""

    save: str
    receiver: Receiver


@dataclass(frozen=True, slots=True, kw_only=True)
class TerminationNoticed(_Happened):
    """The pod is about to end. `deadline` is unix seconds; None: no time limit."""

    deadline: float | None
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRegistered(_Happened):
    """A training process has registered: announcements of `rank` come from the process with this local rank."""

    local_rank: LocalRank
    rank: Rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Exited(_Happened):
    """The agent exited in an orderly way, or restore has run since it was killed.

    Its termination notice is void, and its trainers are gone.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkFailed(WorkEnded):
    """A command ended without a known effect. `jitter` is in [0, 1).

    `path`: the file in the checkpoint that is to blame, where `work` does not say it: one of a pack.
    """

    kind: ErrorKind
    message: str
    hint: str
    jitter: float
    path: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkCancelled(WorkEnded):
    """A transfer was stopped before its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequested(_Happened):
    """The agent got SIGTERM, or the runner's program has ended (`trainers_gone`): exit once the drain is done.

    `nothing_found` says that nothing of this run is stored and that nothing is left to announce; empty if there is.
    """

    trainers_gone: bool
    nothing_found: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksSeen(_Happened):
    """Which local ranks are alive, by their locks and open streams.

    `left` and `lost_at` are of ranks that have left for a notice: whether one has, and the greatest step at which one
    has lost what it did; None if none. `cut_short`: the greatest step of a rank that has ended in the midst of training
    without a word, and when it told it.
    """

    alive: frozenset[int]
    left: bool = False
    lost_at: int | None = None
    cut_short: StepSign | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSeen(_Happened):
    """A look at how far the live ranks say that they are. `newest`: None if none of them says it."""

    newest: StepSign | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskRead(_Happened):
    """A reading of the volume, as in ports.DiskReading."""

    used_bytes: int
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveBegun(_Happened):
    """A trainer was admitted to write a checkpoint. `attempt` and `step` tell which earlier saves it follows."""

    save: str
    attempt: str
    step: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveAborted(_Happened):
    save: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequested(_Happened):
    """An operator wants a checkpoint now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveGiven(_Happened):
    """The program says how old the recovery point may get, and which share of its time saves may take; 0: any."""

    recovery_point_seconds: float
    max_overhead: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputLooked(_Happened):
    """The output directories were looked at. `not_stored`: a line for each file that no snapshot holds, and why."""

    not_stored: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotNoted(_Happened):
    """The mirror has noted what a committed snapshot holds, and does not ask for its files again."""

    save: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruned(WorkEnded):
    """The retention settings were applied to the bucket."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered(WorkEnded):
    """The store answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recalled(WorkEnded):
    """The records of a save that was set aside while it was read. `events`: what they tell, which is in the journal."""

    events: tuple["DurableEvent", ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Survived(_Happened):
    """Work of the agent's that belongs to no save has ended, and the agent lives."""

    suspect: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticked(_Happened):
    """A moment at which the core asked to be woken has come."""


DurableEvent = (
    Announced
    | Staged
    | UploadCreated
    | PartStored
    | FileStored
    | PackStored
    | ManifestStored
    | Reconciled
    | ObjectsLost
    | Committed
    | Released
    | Abandoned
    | Shed
    | Failed
    | NewsDue
    | NewsTaken
    | TerminationNoticed
    | RankRegistered
    | Exited
)
Event = (
    DurableEvent
    | Started
    | SentChecked
    | CommitWaits
    | WorkFailed
    | WorkCancelled
    | StopRequested
    | RanksSeen
    | StepSeen
    | DiskRead
    | SaveBegun
    | SaveAborted
    | SaveRequested
    | ObjectiveGiven
    | OutputLooked
    | SnapshotNoted
    | Pruned
    | Answered
    | Recalled
    | Survived
    | Ticked
)

EVENT_TAGS: Final[Mapping[type[DurableEvent], str]] = {
    Announced: "announced",
    Staged: "staged",
    UploadCreated: "upload-created",
    PartStored: "part-stored",
    FileStored: "file-stored",
    PackStored: "pack-stored",
    ManifestStored: "manifest-stored",
    Reconciled: "reconciled",
    ObjectsLost: "objects-lost",
    Committed: "committed",
    Released: "released",
    Abandoned: "abandoned",
    Shed: "shed",
    Failed: "failed",
    NewsDue: "news-due",
    NewsTaken: "news-taken",
    TerminationNoticed: "termination-noticed",
    RankRegistered: "rank-registered",
    Exited: "exited",
}
"""Events that the journal keeps, and their tags there. A tag never changes, because a journal outlives its agent."""

DURABLE: Final[tuple[type[DurableEvent], ...]] = tuple(EVENT_TAGS)

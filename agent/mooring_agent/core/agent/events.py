"""Everything that can happen to the agent. Events carry their time and any generated id; the core invents neither.

The classes in `DURABLE` are journaled before they take effect and are enough to rebuild the state after a crash.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from mooring_agent.core.agent.work import WorkId
from mooring_agent.core.errors import ErrorKind
from mooring_agent.core.limits import FileNames, LocalRank, LocalRanks, Rank
from mooring_agent.core.model import SaveInfo, StagedFile


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The agent is up and has replayed its journal. `fresh`: the pod is new, its old termination notices are void."""

    at: float
    fresh: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Announced:
    """A rank's part of a checkpoint is complete on disk.

    `files` empty: everything below `source`. `local_world_size` > 1: others share the directory, wait for all of them.
    `signature` is of what lay there when the rank said so: nothing is staged but what one of those that share the
    directory has seen. `save_made_here`: the agent made the save id, and the content says what is the same.
    `recorded_at`: when its client recorded it, if the agent found it by that record and nobody announced it here.
    """

    at: float
    info: SaveInfo
    rank: Rank
    source: str
    files: FileNames
    local_world_size: LocalRanks
    signature: str = ""
    save_made_here: bool = False
    recorded_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """A rank's files are pinned; the trainer may delete its own.

    `part_size_bytes` is what was preferred at the time: what follows is told in parts of it, whatever is set later. So
    is `pack_size_bytes`, in packs; 0, as in the journals of older versions: nothing is packed.
    """

    at: float
    work: WorkId
    files: tuple[StagedFile, ...]
    part_size_bytes: int
    pack_size_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadCreated:
    at: float
    work: WorkId
    upload_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PartStored:
    at: float
    work: WorkId
    etag: str
    checksum: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FileStored:
    """An object is durable. `checksum` is None where the parts' checksums are known already, or the file is empty."""

    at: float
    work: WorkId
    checksum: int | None
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PackStored:
    """A pack is durable: a checksum for each of its files, in order (an empty one's means nothing), and their bytes."""

    at: float
    work: WorkId
    checksums: tuple[int, ...]
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestStored:
    at: float
    work: WorkId


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundUpload:
    """A multipart upload as it really is in the store: the parts that are surely ours, as (number, ETag, checksum)."""

    rank: int
    path: str
    upload_id: str
    parts: tuple[tuple[int, str, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundFile:
    """An object that is already stored whole. `checksum` as in FileStored."""

    rank: int
    path: str
    checksum: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconciled:
    """After a restart: what the store really has of a save. Whatever is not named here is sent again."""

    at: float
    work: WorkId
    uploads: tuple[FoundUpload, ...]
    files: tuple[FoundFile, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectsLost:
    """Files of ours, as (rank, path), that the listing lacks or shows with another size; and ranks without manifest.

    So for packs, as (rank, number).
    """

    at: float
    work: WorkId
    files: tuple[tuple[int, str], ...]
    manifests: tuple[int, ...]
    packs: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitWaits:
    """Ours is sealed; `missing_ranks` manifests of other agents are not there yet."""

    at: float
    work: WorkId
    missing_ranks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """The marker exists and was read back."""

    at: float
    work: WorkId


@dataclass(frozen=True, slots=True, kw_only=True)
class Abandoned:
    """No multipart upload of a save that is given up is left in the store."""

    at: float
    work: WorkId


@dataclass(frozen=True, slots=True, kw_only=True)
class Released:
    at: float
    work: WorkId


@dataclass(frozen=True, slots=True, kw_only=True)
class Shed:
    """Decided by the core: a superseded checkpoint is given up."""

    at: float
    save: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """Decided by the core: a checkpoint cannot become durable. What is on disk stays there."""

    at: float
    save: str
    kind: ErrorKind
    reason: str
    hint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TerminationNoticed:
    """The pod is about to end. `deadline` is unix seconds, None: no time limit."""

    at: float
    deadline: float | None
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRegistered:
    """A training process has said which of the job's ranks it is: whoever announces as `rank` is that local rank."""

    at: float
    local_rank: LocalRank
    rank: Rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Exited:
    """The agent ended in an orderly way; its termination notice is used up, and its trainers are gone."""

    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkFailed:
    """A command ended without effect that we know of. `jitter` in [0, 1)."""

    at: float
    work: WorkId
    kind: ErrorKind
    message: str
    hint: str
    jitter: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkCancelled:
    at: float
    work: WorkId


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequested:
    """Our own SIGTERM, or a runner whose program has ended (`trainers_gone`): exit once the drain is done."""

    at: float
    trainers_gone: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksSeen:
    """Which local ranks are alive, by their locks and open streams."""

    at: float
    alive: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskRead:
    """A reading of the volume, as in ports.DiskReading."""

    at: float
    used_bytes: int
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveBegun:
    """A trainer is about to write a checkpoint and was given leave. `attempt` and `step` say what it is the next of."""

    at: float
    save: str
    attempt: str
    step: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveAborted:
    at: float
    save: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequested:
    """An operator wants a checkpoint now."""

    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruned:
    at: float
    work: WorkId
    deleted: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticked:
    """Time has passed to a moment the core asked to be woken at."""

    at: float


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
    | TerminationNoticed
    | RankRegistered
    | Exited
)
Event = (
    DurableEvent
    | Started
    | CommitWaits
    | WorkFailed
    | WorkCancelled
    | StopRequested
    | RanksSeen
    | DiskRead
    | SaveBegun
    | SaveAborted
    | SaveRequested
    | Pruned
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
    TerminationNoticed: "termination-noticed",
    RankRegistered: "rank-registered",
    Exited: "exited",
}
"""Events that the journal keeps, and their tags there. A tag never changes: a journal outlives its agent."""

DURABLE: Final[tuple[type[DurableEvent], ...]] = tuple(EVENT_TAGS)


def save_of(event: DurableEvent) -> str | None:
    """The save an event belongs to; None for events of the agent as a whole."""
    match event:
        case Announced():
            return event.info.save
        case Shed() | Failed():
            return event.save
        case TerminationNoticed() | RankRegistered() | Exited():
            return None
        case _:
            return event.work.save

"""Everything the core may ask the runtime to do.

Each command with a `work` ends in exactly one event that carries the same `work`.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import TypeGuard

from keepstep_agent.core.agent.events import Announced, Failed, NewsDue, Shed
from keepstep_agent.core.agent.work import WorkId
from keepstep_agent.core.file_lists import StagedFiles
from keepstep_agent.core.model import AnnouncementTime, RankManifest, Region, SaveInfo, StagedFile
from keepstep_agent.core.stored.packs_and_parts import Pack


@dataclass(frozen=True, slots=True, kw_only=True)
class _OfWork:
    work: WorkId


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage(_OfWork):
    """Pin the files of the first announcement's rank. Ends in Staged.

    The other announcements are those of the ranks that share its directory; they have the same files. `private` and
    `rewritten_inodes` are as in ports.StageRequest.
    """

    announcements: tuple[Announced, ...]
    private: bool
    rewritten_inodes: frozenset[int]
    part_size_bytes: int
    pack_size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownFile:
    """What the journal knows of a file that is not yet durable.

    `upload` is empty if no upload was begun. `parts` are those that were stored, as (number, receipt, checksum).
    """

    rank: int
    file: StagedFile
    upload: str
    part_size_bytes: int
    parts: tuple[tuple[int, str, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconcile(_OfWork):
    """Find out what the store has of a save, and abort uploads of our files that we do not know.

    Ends in Reconciled, or in Committed if the marker of these announcements already exists. `announced_at` and `staged`
    are by rank. Other agents may be uploading their share of the same save: an upload for a file that is not in
    `staged` is theirs.
    """

    info: SaveInfo
    announced_at: tuple[tuple[int, AnnouncementTime], ...]
    staged: tuple[tuple[int, StagedFiles], ...]
    unfinished: tuple[KnownFile, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateUpload(_OfWork):
    """Begin a multipart upload. Ends in UploadCreated."""

    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SendPart(_OfWork):
    """Send one part of `work.upload`. Ends in PartStored."""

    key: str
    region: Region


@dataclass(frozen=True, slots=True, kw_only=True)
class PutFile(_OfWork):
    """Send a file whole. Ends in FileStored."""

    key: str
    region: Region


@dataclass(frozen=True, slots=True, kw_only=True)
class PutPack(_OfWork):
    """Send many small files, whose pins are below `volume`, as one object. Ends in PackStored."""

    key: str
    pack: Pack
    volume: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CompleteUpload(_OfWork):
    """Assemble the object of `work.upload`; on an error look whether it exists already. Ends in FileStored."""

    key: str
    receipts: tuple[str, ...]
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckSent(_OfWork):
    """Compare a rank's pins with what was sent, a last time. Ends in SentChecked."""

    manifest: RankManifest
    pins: StagedFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteManifest(_OfWork):
    """Write the manifest of all ranks that this agent has of the save. Ends in ManifestStored."""

    ranks: tuple[RankManifest, ...]


class Turn(IntEnum):
    """What an agent does in one try to commit a save; each includes those before it."""

    READ = 1
    """Read the marker, which another agent may have written."""
    LIST = 2
    """List the save, and find out which ranks are missing or which of our objects are lost."""
    WRITE = 3
    """Write the marker if everything of every rank is there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit(_OfWork):
    """Try once to commit a save, of which `ranks` are ours. Ends in Committed, CommitWaits or ObjectsLost.

    `sweep_uploads`: abort leftover multipart uploads after the commit.
    """

    info: SaveInfo
    ranks: tuple[RankManifest, ...]
    turn: Turn
    sweep_uploads: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Release(_OfWork):
    """Drop a save's pins to make room on the volume. Needs no store. Ends in Released.

    `is_committed`: after a crash the marker says that the save is over.
    """

    is_committed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Abandon(_OfWork):
    """Abort the multipart uploads of a save that is given up. Ends in Abandoned.

    `uploads` are (key, upload) pairs. `sweep_keys`: an answer may have been lost, so abort every multipart upload for
    these keys.
    """

    info: SaveInfo
    uploads: tuple[tuple[str, str], ...]
    sweep_keys: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prune(_OfWork):
    """Apply the retention settings to the bucket. Ends in Pruned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask(_OfWork):
    """Look whether there is an object at the destination, to see whether the store answers. Ends in Answered."""

    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Recall(_OfWork):
    """Read the records of a save that was set aside while the agent started. Ends in Recalled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelWork(_OfWork):
    """Stop a transfer. It ends in WorkCancelled unless it ended before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A decision of the core. Its event is journaled and applied before anything else happens."""

    event: Shed | Failed | NewsDue


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSave:
    """Ask the trainers to save. `terminating`: they exit afterwards. `deadline` is unix seconds; 0: none."""

    terminating: bool
    deadline: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LiftBandwidthCap:
    """Upload without the configured bandwidth cap, because the pod is ending."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelTermination:
    """The termination notice expired: trainers that start afterwards train, and the bandwidth cap applies again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """End the agent.

    `lost` has one line for each checkpoint that is neither durable nor shed, and where it lies, and one for each other
    thing that is not stored. `stopped`: the trainers left for a notice.
    """

    code: int
    lost: tuple[str, ...]
    stopped: bool = False


WorkCommand = (
    Stage
    | Reconcile
    | CreateUpload
    | SendPart
    | PutFile
    | PutPack
    | CompleteUpload
    | CheckSent
    | WriteManifest
    | Commit
    | Release
    | Abandon
    | Prune
    | Ask
    | Recall
)
Command = WorkCommand | CancelWork | Record | RequestSave | LiftBandwidthCap | CancelTermination | Exit


def waits_for_its_record(command: Command) -> TypeGuard[Release]:
    """Whether a command waits until the journal is durable.

    Once the pins of a save that was given up are gone, only the journal says that it is over. Everything else can be
    found out again from the store and the staged files. A committed save's pins may be what keeps the journal from
    having room, so they wait for nothing.
    """
    return isinstance(command, Release) and not command.is_committed

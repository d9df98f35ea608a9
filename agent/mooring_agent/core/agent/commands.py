"""Everything the core may ask the runtime to do. Each command with a `work` ends in exactly one event that names it."""

from dataclasses import dataclass
from typing import Final

from mooring_agent.core.agent.events import Announced, Failed, Shed
from mooring_agent.core.agent.work import WorkId
from mooring_agent.core.model import AnnouncementTime, Pack, RankManifest, Region, SaveInfo, StagedFile


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Pin the files of the first announcement's rank. Ends in Staged.

    The other announcements are those of the ranks that share its directory, and have no files of their own. `private`
    and `rewritten_inodes` as in ports.StageRequest.
    """

    work: WorkId
    announcements: tuple[Announced, ...]
    private: bool
    rewritten_inodes: frozenset[int]
    part_size_bytes: int
    pack_size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownFile:
    """What the journal knows of a file that is not yet durable; `upload_id` empty: none was begun."""

    rank: int
    file: StagedFile
    upload_id: str
    part_size_bytes: int
    parts: tuple[tuple[int, str, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconcile:
    """Find out what the store has of a save, and abort uploads of our files that we do not know.

    Ends in Reconciled, or in Committed where the marker is there already, of these very announcements: `announced_at`
    is by rank. Other agents may be uploading their share of the same save: what is not for a file in
    `staged` is theirs.
    """

    work: WorkId
    info: SaveInfo
    announced_at: tuple[tuple[int, AnnouncementTime], ...]
    staged: tuple[tuple[int, tuple[StagedFile, ...]], ...]
    unfinished: tuple[KnownFile, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateUpload:
    """Begin a multipart upload. Ends in UploadCreated."""

    work: WorkId
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SendPart:
    """Send one part. Ends in PartStored."""

    work: WorkId
    key: str
    upload_id: str
    region: Region


@dataclass(frozen=True, slots=True, kw_only=True)
class PutFile:
    """Send a file whole. Ends in FileStored."""

    work: WorkId
    key: str
    region: Region


@dataclass(frozen=True, slots=True, kw_only=True)
class PutPack:
    """Send many small files as one object. Their pins are below `volume`. Ends in PackStored."""

    work: WorkId
    key: str
    pack: Pack
    volume: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CompleteUpload:
    """Make the object of its parts; on an error look whether it exists already. Ends in FileStored."""

    work: WorkId
    key: str
    upload_id: str
    etags: tuple[str, ...]
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteManifest:
    """Look at the pins a last time, and write what was sent of them. Ends in ManifestStored."""

    work: WorkId
    manifest: RankManifest
    pins: tuple[StagedFile, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """List the save, compare, and write the marker if every rank's manifest is there and `may_write_marker`.

    Ends in Committed, CommitWaits or ObjectsLost. `sweep_uploads`: abort multipart uploads left over, once committed.
    """

    work: WorkId
    info: SaveInfo
    manifests: tuple[RankManifest, ...]
    may_write_marker: bool
    sweep_uploads: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Drop a save's pins: room on the volume, whatever the store does. Ends in Released."""

    work: WorkId


@dataclass(frozen=True, slots=True, kw_only=True)
class Abandon:
    """Abort the multipart uploads, as (key, id), of a save that is given up. Ends in Abandoned.

    `sweep_keys`: an answer was lost, so abort every multipart upload for these keys, whatever its id.
    """

    work: WorkId
    info: SaveInfo
    uploads: tuple[tuple[str, str], ...]
    sweep_keys: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prune:
    """Apply the retention settings to the bucket. Ends in Pruned."""

    work: WorkId


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelWork:
    """Stop a transfer; it ends in WorkCancelled unless it had ended before."""

    work: WorkId


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A decision of the core: journal the event and step it before anything else happens."""

    event: Shed | Failed


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSave:
    """Ask the trainers to save. `deadline` is unix seconds, 0 when they shall go on afterwards."""

    terminating: bool
    deadline: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LiftBandwidthCap:
    """From now on every byte per second counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelTermination:
    """The pod was spared: trainers that start now train, and uploads are as fast as they were allowed to be before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """End the agent. `lost` has one line per checkpoint that is not durable and where it still lies."""

    code: int
    lost: tuple[str, ...]


WorkCommand = (
    Stage
    | Reconcile
    | CreateUpload
    | SendPart
    | PutFile
    | PutPack
    | CompleteUpload
    | WriteManifest
    | Commit
    | Release
    | Abandon
    | Prune
)
AFTER_ITS_RECORD: Final = (Release,)
"""What must not run ahead of the journal: without pins only the record says that a checkpoint was over. Everything else
can be found out again, from the store and from what is staged."""

Command = WorkCommand | CancelWork | Record | RequestSave | LiftBandwidthCap | CancelTermination | Exit

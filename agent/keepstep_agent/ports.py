"""What the runtime needs from the outside world, as Protocols. Each has one real adapter per environment and one fake.

The contracts are written here in prose, and in `tests/adapters` as one conformance suite that runs on the fakes and on
the real adapters.
"""

from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Protocol

from msgspec import Meta

from keepstep_agent.core.file_lists import StagedFiles
from keepstep_agent.core.limits import ANNOUNCEMENT_CHARACTERS, LEAST_ANNOUNCEMENT_CHARACTERS, LOCAL_RANKS, FileBytes
from keepstep_agent.core.model import RankManifest, Region, SourceFile


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """An object as `head` and `list` show it. `modified_at` is unix seconds by the store's clock.

    `version` is an opaque token of the bytes under the key, such as an ETag: other bytes have another one. `md5` as in
    PartInfo.
    """

    key: str
    size_bytes: int
    modified_at: float
    version: str
    md5: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadInfo:
    """An upload in parts that is neither completed nor aborted. `upload` is the token of `create_upload`.

    `size_bytes` is how much it holds, if the listing says it. For None, add up the sizes of `list_parts`.
    """

    key: str
    upload: str
    started_at: float
    size_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PartInfo:
    """A part of an upload that the store holds. `receipt` is what `put_part` returned for it.

    `md5` is the MD5 of its bytes in hexadecimal, if the store says it; else it is empty or anything that is no MD5 of
    these bytes. By it the agent recognises what arrived just before a crash.
    """

    number: int
    size_bytes: int
    receipt: str
    md5: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreCapabilities:
    """What the store really does, as a probe found it.

    `conditional_put`: `put(…, if_absent=True)` refuses if the key exists.
    `integrity`: the cheapest check that the store really enforces: crc64nvme, crc32c, sha256, or none. `md5` is what a
    store wants that refuses writes without a checksum and knows no other.
    """

    conditional_put: bool
    integrity: str


class StoreReader(Protocol):
    """Reads objects below one destination's prefix. Keys are relative to it.

    - Every method raises StoreError only, and VolumeError for the local file that it reads or writes. A missing key is
      NOT_FOUND, a missing bucket BUCKET_MISSING.
    - Every call is bounded by the store's own time-outs and may be cancelled at any point.
    - No method retries: retry policy belongs to the core (uploads) or to `retrying_store` (people waiting).
    - Reads and listings see every write that was acknowledged before they began.
    """

    async def head(self, key: str) -> ObjectInfo:
        """Return what is stored under `key`."""

    async def get(self, key: str, *, limit_bytes: int, fresh: bool = False) -> bytes:
        """Return a small object whole. REQUEST_REFUSED if it is larger than `limit_bytes`.

        `fresh`: use a new connection, if the store uses any, because the last answer made no sense.
        """

    async def get_into(self, key: str, *, offset_bytes: int, size_bytes: int, version: str, descriptor: int) -> int:
        """Read at least one byte of an object into the same offset of an open file; returns the bytes' CRC64NVME.

        CHECKPOINT_CORRUPT if the object is shorter or not of this version any more; DISK_FULL as VolumeError.
        """

    def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        """Yield every object whose key begins with `prefix` once, in the store's own order."""

    def list_folders(self, prefix: str) -> AsyncIterator[str]:
        """Yield each folder right below `prefix` once, in the store's own order: what keys have up to their next slash.

        `prefix` is empty or ends with a slash, as every folder does. All that have an object are listed; a store
        may go on listing a folder for some time after its last object was deleted.
        """

    def list_uploads(self, prefix: str) -> AsyncIterator[UploadInfo]:
        """Yield the uploads in progress for keys that begin with `prefix`. REQUEST_REFUSED if the store cannot."""

    async def list_parts(self, key: str, upload: str) -> Sequence[PartInfo]:
        """Return the parts that the store holds, by number. UPLOAD_LOST if it no longer knows the upload."""


class StoreWriter(StoreReader, Protocol):
    """Also writes small objects, and removes what is no longer needed. The contract of StoreReader holds, and:

    - A write that ended in an error may still take effect, at once or later. Repeating it with the same bytes is
      harmless.
    - An object appears whole or not at all, and is durable when its write was acknowledged.
    """

    async def probe(self) -> StoreCapabilities:
        """Test what the store enforces, below `.keepstep/probe/`, and clean up. Writes rely on what the last one found.

        Makes a destination that is missing, if the store can.
        """

    async def put(self, key: str, body: bytes, *, if_absent: bool = False) -> None:
        """Write a small object. ALREADY_EXISTS with `if_absent` if the key exists.

        If the probe found no conditional put, `if_absent` is not sent, and the object is written in any case.
        """

    async def delete(self, key: str) -> None:
        """Remove an object. One that does not exist is fine. OBJECT_LOCKED if the store's own retention protects it."""

    async def abort_upload(self, key: str, upload: str) -> None:
        """Abort an upload and free its parts. One that does not exist is fine."""


class ObjectStore(StoreWriter, Protocol):
    """All that the agent needs: also sends a checkpoint's bytes. The contract of StoreWriter holds, and:

    - Bytes of a file are sent only if they have the CRC64NVME that the caller names: FILE_CHANGED as VolumeError if
      not, FILE_MISSING if the file is gone.
    - Upload tokens and receipts are opaque strings of the store's own, never empty. They outlive this process in a
      journal.
    """

    async def put_data(self, key: str, content: Region | bytearray, checksum: int) -> None:
        """Write a file's bytes, or bytes in memory that do not change, as one object. `checksum` is their CRC64NVME."""

    async def create_upload(self, key: str) -> str:
        """Begin to write an object in parts; returns the upload's token."""

    async def put_part(self, key: str, upload: str, number: int, region: Region, checksum: int) -> str:
        """Send one part; returns its receipt. `number` is its place in the object, from 1.

        Parts come in any order, and again after a doubt. UPLOAD_LOST if the store no longer knows the upload.
        """

    async def complete_upload(self, key: str, upload: str, receipts: Sequence[str]) -> None:
        """Assemble the object from parts 1…n, whose receipts these are. The parts are consecutive regions of one file.

        UPLOAD_LOST if the upload was completed or aborted before, or a receipt is not that of its part.
        """

    async def aborts_uploads(self) -> bool | None:
        """Whether the store aborts every unfinished upload by itself after some time; None if it has no such rules."""

    async def keeps_old_versions(self) -> bool | None:
        """Whether what is deleted or replaced stays for ever, as an old version; None if the store has no versions."""

    async def close(self) -> None:
        """Release connections. Idempotent."""


class Journal(Protocol):
    """The agent's durable log of opaque, ordered records. Appended records survive a SIGKILL and a power cut.

    All methods block: call them off the event loop.
    """

    def append(self, records: Sequence[bytes]) -> None:
        """Append all records or none. They are durable when this returns."""

    def replay(self) -> Iterator[bytes]:
        """Yield all records, oldest first; none if a full volume has no room for a new journal.

        Few are in memory at a time. Exhaust it, or drop it, before the journal changes.
        """

    def drop(self, positions: Collection[int]) -> None:
        """Remove the records at these positions of `replay`, all or none, for compaction."""

    def move_aside(self) -> None:
        """Keep the journal, which cannot be trusted, under another name, and begin a new one.

        If a full volume has no room for the new journal, the first `append` that finds room creates it.
        """

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedDescriptor:
    """What is stored beside the pins of a rank, so that `scan` can rebuild what the journal knew.

    `announcements` are the records of what was announced, which are opaque to a staging area. The sizes are those of
    `Staged`; 0 if an older version recorded none.
    """

    announcements: Annotated[
        tuple[Annotated[str, Meta(min_length=LEAST_ANNOUNCEMENT_CHARACTERS, max_length=ANNOUNCEMENT_CHARACTERS)], ...],
        Meta(max_length=LOCAL_RANKS),
    ]
    part_size_bytes: FileBytes = 0
    pack_size_bytes: FileBytes = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRequest:
    """What to pin: `files` (relative to `path`) or, if empty, everything below `path`.

    `others`: files of the program's own, which are copied; one that cannot be copied is left out. `private`: copy or
    reflink instead of hard links, because this trainer rewrites files in place. The same holds for a file with one of
    `rewritten_inodes`. `signatures`: if there are any, `content_signature` of `files` must still return one of them.
    `descriptor` is stored beside the links. `sources`: pin these files of the output directories instead, each as it
    says; `path`, `files`, `others`, `private` and `signatures` do not apply. `kept`: what the manifest names besides.
    """

    save: str
    rank: int
    path: str
    files: tuple[str, ...]
    private: bool
    descriptor: StagedDescriptor
    rewritten_inodes: frozenset[int] = frozenset()
    signatures: frozenset[str] = frozenset()
    sources: Sequence[SourceFile] | None = None
    kept: Sequence[str] = ()
    others: tuple[str, ...] = ()


def save_of_pin(pin: str) -> str:
    """Return the save that a pin belongs to, by the pin's path below the volume."""
    return pin.split("/")[2]


class StagingArea(Protocol):
    """Pinned checkpoints below the volume.

    All methods block: call them off the event loop. They raise VolumeError or RequestError.
    """

    def make_durable(self, path: str, files: Sequence[str]) -> None:
        """Write the announced files to disk, so that what is staged after a power cut is whole.

        `files` are as in StageRequest. DISK_FULL or VOLUME_UNUSABLE if this fails. Files that are missing or may not be
        staged are no error here: `stage` reports them.
        """

    def stage(self, request: StageRequest) -> StagedFiles:
        """Pin the files durably, all or none, and copy what can be copied of the others.

        Idempotent for the same save and rank.
        """

    def check(self, save: str, rank: int, files: StagedFiles) -> None:
        """Raise FILE_MISSING or FILE_CHANGED if the pinned files are not what they were."""

    def check_sent(self, manifest: RankManifest, files: StagedFiles, *, may_read: Callable[[], bool]) -> None:
        """As `check`, after all files were sent: FILE_CHANGED also if bytes do not have the manifest's checksums.

        Reads again the files that may have been written to without a trace. `files` are the manifest's, in its order.
        `may_read` is called before each part, from any thread; reading ends the first time that it returns False.
        """

    def release(self, save: str) -> None:
        """Drop every pin of a save. A save without pins is fine."""

    def scan(self, may_read: Callable[[str], bool] = lambda _: True) -> Iterable[tuple[StagedDescriptor, StagedFiles]]:
        """Return (descriptor, files) of everything staged, for recovery when the journal is lost.

        `may_read` is asked for each save before anything of it is read; those that it refuses are left out and kept.

        The trainer can write descriptors, so one that is beyond the limits or whose pins have other sizes is left out.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskReading:
    """How full the volume is.

    `used_bytes` is counted as kubelet does: blocks x 512, hard links once. The other two are of the whole filesystem.
    """

    used_bytes: int
    free_bytes: int
    total_bytes: int


class Clock(Protocol):
    """Tells the time, so that tests can control it."""

    def now(self) -> float:
        """Return unix seconds. They never go back or jump, so they may differ from a wall clock that was set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TerminationNotice:
    """A cloud is about to take this machine away.

    `key` stays the same for the same end. Nothing ends before `left_seconds` have passed since the look that found the
    notice. It is a duration and not a point in time, because this machine's clock may be wrong and may be corrected.
    """

    key: str
    left_seconds: float
    source: str


class PreemptionSource(Protocol):
    """What one cloud says about the end of the machine that the agent runs on.

    - `look` raises PreemptionSourceError only; every call is bounded and may be cancelled at any point.
    - Every `look` returns a notice until it is over or withdrawn. There are none for other machines.
    - An event that does not end the machine, such as a live migration, is no notice.
    """

    cloud: str
    pause_seconds: float
    """The pause between two looks: at least a second, or what the cloud asks for."""

    async def answers(self) -> bool:
        """Whether the agent runs in this cloud."""

    async def look(self) -> Sequence[TerminationNotice]:
        """Return all current notices. The first look returns at once; a later one may wait about a minute for news."""

    async def close(self) -> None:
        """Release connections. Idempotent."""


class EventType(StrEnum):
    """The types of Kubernetes events."""

    NORMAL = "Normal"
    WARNING = "Warning"


@dataclass(frozen=True, slots=True, kw_only=True)
class PodEvent:
    """One line of `kubectl describe pod`. `reason` is one word in CamelCase; `at` is unix seconds."""

    event_type: EventType
    reason: str
    message: str
    at: float


class Cluster(Protocol):
    """The agent's pod, as Kubernetes shows it to people.

    Calls raise ClusterError only; ACCESS_DENIED: the service account lacks the permission. They are bounded and may be
    cancelled.
    """

    async def prepare(self) -> None:
        """Do ahead of the first call what takes a second of it. Idempotent."""

    async def tell(self, event: PodEvent) -> None:
        """Add an Event to the pod."""

    async def annotate(self, key: str, value: str) -> None:
        """Set one annotation of the pod; its others stay."""

    async def close(self) -> None:
        """Release connections. Idempotent."""


class Workload(Protocol):
    """What Kueue knows of the run's job."""

    async def boost(self, value: int) -> None:
        """Set the boost of its priority. Raises ClusterError only. Bounded, and may be cancelled."""

    async def close(self) -> None:
        """Release connections. Idempotent."""

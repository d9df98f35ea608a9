"""What the runtime needs of the outside world, as Protocols. Each has one real adapter per world and one fake.

Contracts are in prose here and as one conformance suite in `tests/adapters`, run on the fake and on the real thing.
"""

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Protocol

from msgspec import Meta

from mooring_agent.core.limits import ANNOUNCEMENT_CHARACTERS, LEAST_ANNOUNCEMENT_CHARACTERS, LOCAL_RANKS, FileBytes
from mooring_agent.core.model import RankManifest, Region, StagedFile


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """An object as a listing or a HEAD shows it. `modified_at` is unix seconds by the store's clock."""

    key: str
    size_bytes: int
    etag: str
    modified_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadInfo:
    """A multipart upload that is neither completed nor aborted."""

    key: str
    upload_id: str
    started_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PartInfo:
    """A part the store holds of a multipart upload."""

    number: int
    size_bytes: int
    etag: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreCapabilities:
    """What a probe found the store to really do.

    `conditional_put`: `put(…, if_absent=True)` refuses when the key exists.
    `integrity`: the cheapest check the store really enforces: crc64nvme, crc32c, sha256, or none.
    """

    conditional_put: bool
    integrity: str


class ObjectStore(Protocol):
    """Objects below one destination's prefix. Keys are relative to it.

    - Every method raises StoreError only; a missing key is NOT_FOUND, a missing bucket BUCKET_MISSING.
    - Every call is bounded by the store's own time-outs and may be cancelled at any point.
    - No method retries: retry policy is the core's (uploads) or `retrying_store`'s (people waiting).
    - After an error the write may still land, now or later; repeating it with the same bytes is harmless.
    - Reads and listings see every write that was acknowledged before they began.
    """

    capabilities: StoreCapabilities

    async def probe(self) -> StoreCapabilities:
        """Try out what the store enforces, below `.mooring/probe/`, clean up, and set `capabilities`."""

    async def put(self, key: str, body: bytes, *, if_absent: bool = False) -> str:
        """Write a small object whole; returns its ETag. With `if_absent` and a key that exists: ALREADY_EXISTS.

        Where `capabilities.conditional_put` is false, `if_absent` is not sent and the object is simply written.
        """

    async def put_region(self, key: str, region: Region, checksum: int) -> str:
        """Write a file's bytes as one object; returns its ETag. FILE_CHANGED if they are not what `checksum` covers."""

    async def put_bytes(self, key: str, body: bytearray, checksum: int) -> str:
        """As `put_region`, for bytes in memory, which stay as they are and have this CRC64NVME; returns the ETag."""

    async def create_upload(self, key: str) -> str:
        """Begin a multipart upload; returns its id."""

    async def put_part(self, key: str, upload_id: str, number: int, region: Region, checksum: int) -> str:
        """Send one part (number from 1); returns its ETag. UPLOAD_LOST if the store no longer knows the upload."""

    async def list_parts(self, key: str, upload_id: str) -> Sequence[PartInfo]:
        """Parts the store holds, by number. UPLOAD_LOST if it no longer knows the upload."""

    async def complete_upload(self, key: str, upload_id: str, etags: Sequence[str]) -> str:
        """Make the object of parts 1…n; returns its ETag. UPLOAD_LOST if it was completed or aborted before.

        Some stores (rclone) show another ETag in `head` and `list`: compare those with each other, not with this one.
        The parts are consecutive regions of one file.
        """

    async def abort_upload(self, key: str, upload_id: str) -> None:
        """Forget a multipart upload and free its parts; one that is gone already is fine."""

    def list_uploads(self, prefix: str) -> AsyncIterator[UploadInfo]:
        """Multipart uploads in progress for keys that begin with `prefix`."""

    async def head(self, key: str) -> ObjectInfo:
        """What is stored under `key`."""

    async def get(self, key: str, *, limit_bytes: int, fresh: bool = False) -> bytes:
        """A small object whole; REQUEST_REFUSED if it is larger than `limit_bytes`.

        `fresh`: over a new connection, where there are any: the last answer made no sense.
        """

    async def get_into(self, key: str, *, offset_bytes: int, size_bytes: int, etag: str, descriptor: int) -> int:
        """Read bytes of an object into the same offset of an open file; returns their CRC64NVME.

        CHECKPOINT_CORRUPT if the object is shorter or its ETag is not `etag`; DISK_FULL as VolumeError.
        """

    def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        """Every object whose key begins with `prefix`, once, in the store's own order."""

    async def delete(self, key: str) -> None:
        """Remove an object; one that is gone already is fine."""

    async def close(self) -> None:
        """Release connections; idempotent."""


class Journal(Protocol):
    """The agent's durable log of opaque, ordered records; what was appended survives a SIGKILL and a power cut.

    All methods block: call them off the event loop.
    """

    def append(self, records: Sequence[bytes]) -> None:
        """Durable when it returns, all or none."""

    def replay(self) -> Iterable[bytes]:
        """All records, oldest first; none where a full volume has no room for a new journal."""

    def rewrite(self, records: Sequence[bytes]) -> None:
        """Replace everything, atomically: compaction."""

    def set_aside(self) -> None:
        """Begin anew; what was there cannot be trusted, and is kept under another name.

        Where a full volume has no room for the new journal, the first `append` that finds room makes it.
        """

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedDescriptor:
    """What is stored beside the pins of a rank, so that a rescan can rebuild what the journal knew.

    `announcements`: the records of what was announced, which mean nothing to a staging area. The sizes are those of
    `Staged`; 0 where an older version told none.
    """

    announcements: Annotated[
        tuple[Annotated[str, Meta(min_length=LEAST_ANNOUNCEMENT_CHARACTERS, max_length=ANNOUNCEMENT_CHARACTERS)], ...],
        Meta(max_length=LOCAL_RANKS),
    ]
    part_size_bytes: FileBytes = 0
    pack_size_bytes: FileBytes = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRequest:
    """What to pin: `files` (relative to `source`) or, when empty, everything below it.

    `private`: copy or reflink instead of hard links, because this trainer rewrites files in place; and so for a file
    with one of `rewritten_inodes`. `signatures`: `content_signature` must still say one of these, if there are any.
    `descriptor` is stored beside the links.
    """

    save: str
    rank: int
    source: str
    files: tuple[str, ...]
    private: bool
    descriptor: StagedDescriptor
    rewritten_inodes: frozenset[int] = frozenset()
    signatures: frozenset[str] = frozenset()


class StagingArea(Protocol):
    """Pinned checkpoints below the volume.

    All methods block: call them off the event loop. They raise VolumeError or RequestError.
    """

    def make_durable(self, source: str, files: Sequence[str]) -> None:
        """The announced files, `files` as in StageRequest, are on disk: what is staged after a power cut is whole.

        DISK_FULL or VOLUME_UNUSABLE when they cannot be. What is missing or may not be staged is left to `stage`.
        """

    def stage(self, request: StageRequest) -> tuple[StagedFile, ...]:
        """Pin the files durably; all or nothing; idempotent for the same save and rank."""

    def check(self, save: str, rank: int, files: Sequence[StagedFile]) -> None:
        """FILE_MISSING or FILE_CHANGED if the pinned files are not what they were."""

    def check_sent(self, manifest: RankManifest, files: Sequence[StagedFile], *, may_read: Callable[[], bool]) -> None:
        """As `check`, when all was sent: FILE_CHANGED also if bytes are not those of the manifest's checksums.

        Reads again what may have been written to without a trace; `files` are the manifest's, in its order. `may_read`
        is asked before each part, from any thread: the first time that it says no, the reading ends.
        """

    def release(self, save: str) -> None:
        """Drop every pin of a save; one that is gone already is fine."""

    def scan(self) -> Iterable[tuple[StagedDescriptor, tuple[StagedFile, ...]]]:
        """(descriptor, files) of everything staged: the way back when the journal is lost.

        The trainer can write a descriptor. What is beyond the limits, or whose pins have other sizes, is left out.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskReading:
    """How full the volume is.

    `used_bytes` as kubelet counts it: blocks x 512, hard links once. The other two are of its whole filesystem.
    """

    used_bytes: int
    free_bytes: int
    total_bytes: int


class Clock(Protocol):
    """Time, so that tests can own it."""

    def now(self) -> float:
        """Unix seconds; never goes back nor jumps, so it may differ from a wall clock that was set meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """A cloud is about to take this machine away.

    `key` is the same as long as it means the same end. Nothing ends before `left_seconds` have passed since the look
    that found it: a span and no moment, as this machine's clock may be wrong and be set right meanwhile.
    """

    key: str
    left_seconds: float
    source: str


class PreemptionSource(Protocol):
    """What one cloud says of the end of the machine we are on.

    - `look` raises NoticesError only; every call is bounded and may be cancelled at any point.
    - A notice stands in every `look` until it is over or taken back, and there is none for other machines.
    - What does not end the machine, a live migration for one, is no notice.
    """

    cloud: str
    pause_seconds: float
    """To be waited between two looks: at least a second, or what the cloud asks for."""

    async def answers(self) -> bool:
        """Whether this is the cloud we are in."""

    async def look(self) -> Sequence[Notice]:
        """All notices that stand. The first look answers at once; a later one may wait for news, a minute or so."""

    async def close(self) -> None:
        """Release connections; idempotent."""


class EventType(StrEnum):
    """As Kubernetes has them."""

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
    """The pod we run in, as Kubernetes shows it to people.

    Both raise ClusterError only; ACCESS_DENIED: the service account may not. Calls are bounded and may be cancelled.
    """

    async def tell(self, event: PodEvent) -> None:
        """Add an Event to the pod's."""

    async def annotate(self, key: str, value: str) -> None:
        """Set one annotation of the pod; what else it has stays."""

    async def close(self) -> None:
        """Release connections; idempotent."""

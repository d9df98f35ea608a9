"""The values that everything else uses: checkpoints, their files and their parts.

Owns shapes only. Sizes and offsets are bytes, times are unix seconds, checksums are CRC64NVME as unsigned integers.
The field types from `limits` are for the decoders.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Final

from keepstep_agent.core.limits import Step, WorldSize
from keepstep_api.records import Kind as Kind
from keepstep_api.records import belongs_to, directory_key

# How far the times of a client's record and of the agent's announcement may differ: both read the same machine's clock.
_CLOCKS_DIFFER_SECONDS: Final = 5.0


class Phase(StrEnum):
    """The phases of one checkpoint on one agent. The moves between them are the rows of `lifecycle.TRANSITIONS`."""

    ANNOUNCED = "announced"
    STAGED = "staged"
    UPLOADING = "uploading"
    SEALED = "sealed"
    COMMITTED = "committed"
    RELEASED = "released"
    SHED = "shed"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveInfo:
    """One save of one checkpoint, as all its ranks know it. `save` alone identifies it; no key is ever shared.

    For a snapshot, `name` is its series, such as `node-0`, and `step` its number in the series. `directory`: where it
    was saved, relative to the volume; empty: in the checkpoint directory. `output`: the output directory that it
    belongs to, if that is another one.
    """

    save: str
    name: str
    step: Step
    kind: Kind
    world_size: WorldSize
    directory: str = ""
    output: str = ""

    @property
    def is_snapshot(self) -> bool:
        return self.kind is Kind.SNAPSHOT

    @property
    def output_directory(self) -> str:
        """The output directory that it belongs to, relative to the volume; empty: the checkpoint directory."""
        return belongs_to(self.directory, self.output)

    @property
    def output_key(self) -> str:
        """What tells the checkpoints of its output directory from others'; empty: the checkpoint directory."""
        return directory_key(self.output_directory)

    @property
    def path(self) -> str:
        """Its directory and its name, for people."""
        return f"{self.directory}/{self.name}" if self.directory else self.name

    def __str__(self) -> str:
        """Describe the save in one phrase, for people."""
        if self.is_snapshot:
            return f"snapshot {self.step} of {self.name}"
        return f"{self.path} (step {self.step}, {self.kind})"


class Receiver(StrEnum):
    """Who is told of commits."""

    URL = "url"
    COMMAND = "command"


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitNews:
    """What receivers are told of a commit."""

    info: SaveInfo
    attempt: str
    size_bytes: int
    committed_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """Identifies a file's content when it was staged. A different one later means that the file was rewritten."""

    size_bytes: int
    mtime_ns: int
    inode: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedFile:
    """A pinned file. `path` is relative to the checkpoint, with `/`; `pin` is where its bytes are, below the volume.

    `private`: the inode is ours alone (copied or reflinked), so nobody can rewrite it in place. `announced`: the
    checkpoint is this file itself, not a directory that holds it. `changed_ns` is the inode's ctime when it was staged,
    which nobody can set: a later one means that the file was written to, renamed or unlinked. 0: not known.
    """

    path: str
    pin: str
    fingerprint: Fingerprint
    private: bool
    announced: bool = False
    changed_ns: int = 0

    @property
    def size_bytes(self) -> int:
        return self.fingerprint.size_bytes


class PinMethod(StrEnum):
    """How a file of an output directory is pinned.

    `COPY` where its program writes into the same inode again, `COPY_AS_IS` where it may be writing at this moment.
    """

    LINK = "link"
    COPY = "copy"
    COPY_AS_IS = "copy-as-is"


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """A file of an output directory that a snapshot sends. `path` begins with the name of the directory.

    Of the files of one `group` all are pinned or none.
    """

    path: str
    fingerprint: Fingerprint
    method: PinMethod
    group: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One piece of a file. `number` counts from 1, as in S3; a file sent whole is its part 1."""

    number: int
    offset_bytes: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Bytes of a pinned file to send. The file must still have `fingerprint`. `path` is below the volume."""

    volume: str
    path: str
    offset_bytes: int
    size_bytes: int
    fingerprint: Fingerprint

    @property
    def file(self) -> str:
        """The file's whole path, for messages."""
        return f"{self.volume}/{self.path}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PackPlace:
    """Where a packed file's bytes begin: the number of the rank's pack, and the offset in the archive."""

    number: int
    offset_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotId:
    """A snapshot: its series, its number there (a later one has a higher number), and its save."""

    series: str
    number: Step
    save: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """The save that stored a file's bytes, where that is another one. `path` is the file's path in that save."""

    name: str
    save: str
    rank: int
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """A file in a manifest: `checksums[i]` covers bytes [i, i + 1) x `part_size_bytes`; the last part is shorter.

    An empty file has no checksums. Without a `place` the file is an object of its own. The other fields are only set in
    snapshots: `owner` if an earlier snapshot stored the bytes, `modified_ns` the mtime, `link` the target of a symbolic
    link, relative to the folder that holds it; a link has no bytes.
    """

    path: str
    size_bytes: int
    part_size_bytes: int
    checksums: Sequence[int] = field(hash=False)
    place: PackPlace | None = None
    owner: Owner | None = None
    modified_ns: int | None = None
    link: str = ""

    def __post_init__(self) -> None:
        # Eight bytes for each instead of fifty: a save may have millions.
        object.__setattr__(self, "checksums", array("Q", self.checksums))

    @property
    def is_own(self) -> bool:
        """Whether its bytes are stored with the save whose manifest this is."""
        return self.owner is None and not self.link

    def has_bytes_of(self, other: "FileEntry") -> bool:
        """Whether both have the same path and bytes, wherever these are stored and in whatever parts they were sent."""
        if (self.path, self.size_bytes, self.link) != (other.path, other.size_bytes, other.link):
            return False
        if self.part_size_bytes == other.part_size_bytes or len(self.checksums) == len(other.checksums) == 1:
            return self.checksums == other.checksums
        return self._whole_checksum() == other._whole_checksum()

    def parts(self) -> Iterator[Part]:
        """Return the parts that `checksums` cover, in order."""
        return (
            Part(
                number=index + 1,
                offset_bytes=index * self.part_size_bytes,
                size_bytes=min(self.part_size_bytes, self.size_bytes - index * self.part_size_bytes),
            )
            for index in range(len(self.checksums))
        )

    def _whole_checksum(self) -> int:
        return joined(zip(self.checksums, (part.size_bytes for part in self.parts()), strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankManifest:
    """One rank's part of a manifest: what it contributed to the save. `saved_at`: when it announced it, unix seconds.

    `single_file`: its one file was announced itself, not a directory that holds it. `pack_sizes_bytes[i]` is the size
    of the object that holds its pack `i`.
    """

    info: SaveInfo
    rank: int
    saved_at: float
    files: Sequence[FileEntry]
    single_file: bool = False
    pack_sizes_bytes: tuple[int, ...] = ()

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    @property
    def own_files(self) -> Iterator[FileEntry]:
        """The files whose bytes are stored with this save."""
        return (file for file in self.files if file.is_own)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnouncementTime:
    """When a rank's part of a save was announced, unix seconds.

    `recorded_at`: when its client recorded it, if the agent announced it by that record. An earlier agent may then have
    accepted the same announcement at any later time.
    """

    at: float
    recorded_at: float | None = None

    def may_be(self, saved_at: float) -> bool:
        """Whether a manifest's part with this `saved_at` may be of this announcement."""
        if saved_at == self.at:
            return True
        return self.recorded_at is not None and saved_at >= self.recorded_at - _CLOCKS_DIFFER_SECONDS


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestReference:
    """A manifest as the commit marker names it: of `rank_count` ranks. The checksum covers the manifest's JSON."""

    first_rank: int
    rank_count: int
    size_bytes: int
    checksum: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsOnly:
    """What was dropped of a save of which only the weights are left: files with objects of their own.

    `optimizer_files` are patterns for names of files and folders, as in `fnmatch`. `committed_at` is when the commit
    marker was written, by the store's clock.
    """

    committed_at: float
    optimizer_files: tuple[str, ...]
    dropped_files: int
    dropped_bytes: int


def is_optimizer_file(path: str, patterns: Iterable[str]) -> bool:
    """Whether a file, or a folder that it lies in, has a name that matches one of the patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns for name in path.split("/"))


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitMarker:
    """The last object of a save: its presence alone means restorable. It is a pure function of the manifests.

    With `weights_only` it is the marker of a save that was restorable. All else is as the commit marker said it.
    """

    info: SaveInfo
    saved_at: float
    size_bytes: int
    file_count: int
    manifests: tuple[ManifestReference, ...]
    weights_only: WeightsOnly | None = None

    @property
    def left_bytes(self) -> int:
        """The bytes of its files, less those that were dropped."""
        return self.size_bytes - (self.weights_only.dropped_bytes if self.weights_only else 0)

    @property
    def left_files(self) -> int:
        return self.file_count - (self.weights_only.dropped_files if self.weights_only else 0)

    def has_dropped(self, file: FileEntry) -> bool:
        """Whether a file of its manifests is not stored any more."""
        return (
            self.weights_only is not None
            and file.is_own
            and file.place is None
            and is_optimizer_file(file.path, self.weights_only.optimizer_files)
        )


def joined(pieces: Iterable[tuple[int, int]]) -> int:
    """Return the CRC64NVME of consecutive pieces, each given as (CRC64NVME, size in bytes) of at most 64 bits."""
    # Imported only here, because it costs 5 MB: most agents never compare files that were cut into different parts.
    from awscrt.checksums import combine_crc64nvme

    whole = 0
    for checksum, size_bytes in pieces:
        whole = combine_crc64nvme(whole, checksum, size_bytes)
    return whole

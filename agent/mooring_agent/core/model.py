"""The values that everything else uses: checkpoints, their files and their parts.

Owns shapes only. Sizes and offsets are bytes, times are unix seconds, checksums are CRC64NVME as unsigned integers.
The types of `limits` are for the decoders.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, overload

from mooring_agent.core.limits import Step, WorldSize

# Of the client that wrote a record and the agent that had the announcement: one machine, two readings of its clock.
_CLOCKS_DIFFER_SECONDS: Final = 5.0
_CHECKSUM_BYTES: Final = 8


class Kind(StrEnum):
    """Why a checkpoint was saved."""

    PERIODIC = "periodic"
    JUST_IN_TIME = "just-in-time"
    FINAL = "final"


class Phase(StrEnum):
    """Life of one checkpoint on one agent; the moves between them are the rows of `lifecycle.TRANSITIONS`."""

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
    """One save of one checkpoint, as all its ranks know it. `save` alone identifies it; no key is ever shared."""

    save: str
    name: str
    step: Step
    kind: Kind
    world_size: WorldSize


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """What a file was when it was staged; a different one later means it was rewritten under us."""

    size_bytes: int
    mtime_ns: int
    inode: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedFile:
    """A pinned file. `path` is relative to the checkpoint, with `/`; `pin` is where its bytes are, below the volume.

    `private` says that the inode is ours alone (copied or reflinked), so nobody can rewrite it in place. `announced`:
    the checkpoint is this file itself, not a directory that holds it. `changed_ns` is the inode's time of change when
    it was staged, which nobody can set: a later one means that it was written to, renamed or unlinked; 0: not known.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One piece of a file. `number` counts from 1, as in S3; a file sent whole is its part 1."""

    number: int
    offset_bytes: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pack:
    """Small files of one rank that are stored as one object, a tar archive of `size_bytes`.

    `number` counts from 0 within the rank; the bytes of `files[i]` begin at `offsets_bytes[i]` of the archive.
    """

    number: int
    files: tuple[StagedFile, ...]
    offsets_bytes: tuple[int, ...]
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Bytes of a pinned file to send: where they are, and what the file must still be. `path` is below the volume."""

    volume: str
    path: str
    offset_bytes: int
    size_bytes: int
    fingerprint: Fingerprint

    @property
    def file(self) -> str:
        """The file's whole path, to be shown."""
        return f"{self.volume}/{self.path}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PackPlace:
    """Where a packed file's bytes begin: in which pack of its rank, and at which of the archive's bytes."""

    number: int
    offset_bytes: int


class Checksums(Sequence[int]):
    """Equal to the tuple of them, in eight bytes for each instead of fifty: a save may have millions of parts."""

    __slots__ = ("_packed",)

    def __init__(self, values: Iterable[int]) -> None:
        self._packed = b"".join(value.to_bytes(_CHECKSUM_BYTES) for value in values)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> "Checksums": ...
    def __getitem__(self, index: int | slice) -> "int | Checksums":
        if isinstance(index, slice):
            return Checksums(self[at] for at in range(*index.indices(len(self))))
        at = range(len(self))[index] * _CHECKSUM_BYTES
        return int.from_bytes(self._packed[at : at + _CHECKSUM_BYTES])

    def __len__(self) -> int:
        return len(self._packed) // _CHECKSUM_BYTES

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Checksums):
            return self._packed == other._packed
        return isinstance(other, tuple) and tuple(self) == other

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """A file in a rank manifest: `checksums[i]` covers bytes [i, i + 1) x `part_size_bytes`, the last part is shorter.

    An empty file has no checksums. Without a `place` the file is an object of its own.
    """

    path: str
    size_bytes: int
    part_size_bytes: int
    checksums: Sequence[int]
    place: PackPlace | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.checksums, Checksums):
            object.__setattr__(self, "checksums", Checksums(self.checksums))

    def has_bytes_of(self, other: "FileEntry") -> bool:
        """Whether both are the same file, wherever its bytes are and whatever parts an agent sent it in."""
        if (self.path, self.size_bytes) != (other.path, other.size_bytes):
            return False
        if self.part_size_bytes == other.part_size_bytes or len(self.checksums) == len(other.checksums) == 1:
            return self.checksums == other.checksums
        return self._whole_checksum() == other._whole_checksum()

    def parts(self) -> Iterator[Part]:
        """The pieces that `checksums` cover, in order."""
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
    """What one rank contributed to a save. `saved_at` is when it was announced, unix seconds.

    `single_file`: its one file is what was announced, not a directory that holds it. `pack_sizes_bytes[i]` is the size
    of the object that is its pack `i`.
    """

    info: SaveInfo
    rank: int
    saved_at: float
    files: tuple[FileEntry, ...]
    single_file: bool = False
    pack_sizes_bytes: tuple[int, ...] = ()

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnouncementTime:
    """When a rank's part of a save was announced, unix seconds.

    `recorded_at`: when its client recorded it, if the agent announced it by that record. An earlier agent may then have
    taken the same announcement, at any time since.
    """

    at: float
    recorded_at: float | None = None

    def may_be(self, saved_at: float) -> bool:
        """Whether a rank manifest of that moment may be of this announcement."""
        if saved_at == self.at:
            return True
        return self.recorded_at is not None and saved_at >= self.recorded_at - _CLOCKS_DIFFER_SECONDS


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestReference:
    """A rank manifest as the commit marker names it; the checksum covers the manifest's JSON."""

    rank: int
    size_bytes: int
    checksum: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitMarker:
    """The last object of a save; its presence alone means restorable. A pure function of the rank manifests."""

    info: SaveInfo
    saved_at: float
    size_bytes: int
    file_count: int
    manifests: tuple[ManifestReference, ...]


def joined(pieces: Iterable[tuple[int, int]]) -> int:
    """CRC64NVME of pieces in a row, each as (its CRC64NVME, its size in bytes). Both are of 64 bits at most."""
    # Where it is used, for it costs 5 MB: most agents never compare files that were cut into different parts.
    from awscrt.checksums import combine_crc64nvme

    whole = 0
    for checksum, size_bytes in pieces:
        whole = combine_crc64nvme(whole, checksum, size_bytes)
    return whole

"""Encodes and decodes manifests and commit markers as JSON, and estimates the memory that reading them takes.

A manifest has the ranks that one agent sealed together. Two committers must write the same bytes, so the marker is
computed from the manifests alone, and a value has exactly one encoding. Decoding refuses unknown fields and values
beyond the limits: a checkpoint is restored only if every byte is accounted for, and decoded paths never leave the
checkpoint.

Restore and commit hold all manifests in memory. If they exceeded the memory limit, the kernel would kill the process,
and again after every restart. So the memory is estimated from the manifests' sizes before any is fetched. The factors
were measured with forged manifests of the worst shape (tests/integration/test_manifest_memory.py): the estimate is
never too low.
"""

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Annotated, Any, Final, Literal

from msgspec import Meta, Raw, Struct
from msgspec.json import Decoder

from keepstep_agent.core.errors import ErrorKind, RequestError, StoreError, checkpoint_corrupt
from keepstep_agent.core.file_lists import FileEntries
from keepstep_agent.core.limits import (
    FILES_PER_RANK,
    LOCAL_RANKS,
    MANIFEST_BYTES,
    MANIFESTS_BYTES,
    MARKER_BYTES,
    PARTS_PER_FILE,
    SAVE_BYTES,
    WORLD_SIZE,
    Count,
    FileBytes,
    Moment,
    PathText,
    Rank,
    Stamp,
    Step,
    WorldSize,
)
from keepstep_agent.core.model import (
    CommitMarker,
    FileEntry,
    Kind,
    ManifestReference,
    Owner,
    PackPlace,
    RankManifest,
    SaveInfo,
)
from keepstep_agent.core.stored import checked_json
from keepstep_agent.core.stored.checked_json import UndecodableError, UnknownFormatError
from keepstep_agent.core.stored.object_layout import check_directory, check_file_path, check_link, check_token
from keepstep_agent.core.stored.packs_and_parts import LARGEST_PACK_BYTES, PACK_BYTES

_FORMAT_VERSION: Final = 1

_Checksum = Annotated[str, Meta(pattern=r"^[0-9a-f]{16}\Z")]
_PackBytes = Annotated[int, Meta(ge=0, le=LARGEST_PACK_BYTES)]
_ManifestBytes = Annotated[int, Meta(ge=0, le=MANIFEST_BYTES)]


class StoredObject(Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True, gc=False):
    """Unknown fields are refused, so no input can be nested deeper than these types."""


class _Save(StoredObject, kw_only=True):
    save: str
    name: str
    step: Step
    kind: Kind
    world_size: WorldSize
    directory: PathText = ""
    output: PathText = ""
    checksum: Literal["crc64nvme"]


class _File(StoredObject):
    path: str
    size: FileBytes
    part_size: Annotated[int, Meta(ge=1, le=SAVE_BYTES)]
    checksums: Annotated[tuple[_Checksum, ...], Meta(max_length=PARTS_PER_FILE)]
    pack: Annotated[int, Meta(ge=0, le=FILES_PER_RANK)] | None = None
    offset: _PackBytes | None = None
    owner: Annotated[int, Meta(ge=0, le=FILES_PER_RANK)] | None = None
    owner_path: str = ""
    modified_ns: Stamp | None = None
    link: PathText = ""


_FILE_DECODER: Final = Decoder(_File)


class _Owner(StoredObject):
    name: str
    save: str
    rank: Rank


class _Pack(StoredObject):
    size: _PackBytes


class _Rank(StoredObject):
    rank: Rank
    saved_at: Moment
    # Each is a `_File`. They are decoded one by one, because decoded ones take much memory.
    files: Annotated[list[Raw], Meta(max_length=FILES_PER_RANK)]
    packs: Annotated[tuple[_Pack, ...], Meta(max_length=FILES_PER_RANK)] = ()
    single_file: bool = False
    owners: Annotated[tuple[_Owner, ...], Meta(max_length=FILES_PER_RANK)] = ()


class _Manifest(_Save, kw_only=True):
    format: Literal[1]
    ranks: Annotated[list[_Rank], Meta(min_length=1, max_length=LOCAL_RANKS)]
    crc32: str = ""


class _Reference(StoredObject):
    first_rank: Rank
    rank_count: Annotated[int, Meta(ge=1, le=LOCAL_RANKS)]
    size: _ManifestBytes
    checksum: _Checksum


class MarkerObject(_Save, kw_only=True):
    format: Literal[1]
    saved_at: Moment
    size: Count
    file_count: Count
    manifests: Annotated[tuple[_Reference, ...], Meta(min_length=1, max_length=WORLD_SIZE)]


def encode_manifest(ranks: Sequence[RankManifest]) -> bytes:
    """Encode the manifest of an agent's ranks, which are of one save."""
    return checked_json.encode(_manifest(ranks))


def manifest_pieces(ranks: Sequence[RankManifest]) -> Iterator[bytes]:
    """Yield what `encode_manifest` returns in pieces, so that all of a large one is never in memory."""
    return checked_json.encoded(_manifest(ranks))


def _manifest(ranks: Sequence[RankManifest]) -> _Manifest:
    ordered = sorted(ranks, key=lambda one: one.rank)
    return _Manifest(**_of_save(ordered[0].info), format=_FORMAT_VERSION, ranks=list(map(_encode_rank, ordered)))


def _encode_rank(manifest: RankManifest) -> _Rank:
    owners = sorted({(one.owner.name, one.owner.save, one.owner.rank) for one in manifest.files if one.owner})
    places = {owner: position for position, owner in enumerate(owners)}
    # An iterator: the files are encoded one by one, because encoded ones take much memory.
    files: Any = (_encode_file(file, places) for file in manifest.files)
    return _Rank(
        rank=manifest.rank,
        saved_at=float(manifest.saved_at),
        files=files,
        packs=tuple(_Pack(size=size_bytes) for size_bytes in manifest.pack_sizes_bytes),
        single_file=manifest.single_file,
        owners=tuple(_Owner(name=name, save=save, rank=rank) for name, save, rank in owners),
    )


def decode_manifest(body: bytes, key: str) -> tuple[RankManifest, ...]:
    """Decode a manifest into its ranks, the lowest first.

    Raises StoreError(CHECKPOINT_CORRUPT or FORMAT_UNKNOWN) that names `key`.
    """
    return _decode(body, key, FileEntries)


def check_manifest(body: bytes, key: str) -> None:
    """Raise what `decode_manifest` raises. Of many files it takes less memory."""

    def drop(files: Iterable[FileEntry]) -> FileEntries:
        deque(files, maxlen=0)
        return FileEntries()

    _decode(body, key, drop)


def _decode(body: bytes, key: str, keep: Callable[[Iterable[FileEntry]], FileEntries]) -> tuple[RankManifest, ...]:
    try:
        value = checked_json.decode(body, _Manifest, limit_bytes=MANIFEST_BYTES)
        info = _decode_info(value)
        if any(one.rank >= following.rank for one, following in pairwise(value.ranks)):
            raise UndecodableError("its ranks are not in order")
        if value.ranks[-1].rank >= info.world_size:
            raise UndecodableError(f"rank {value.ranks[-1].rank} in a world of {info.world_size}")
        return tuple(_decode_rank(info, one, keep) for one in value.ranks)
    except (UndecodableError, RequestError, ValueError, RecursionError, OverflowError) as error:
        raise corrupt(key, error) from error


def _decode_rank(info: SaveInfo, value: _Rank, keep: Callable[[Iterable[FileEntry]], FileEntries]) -> RankManifest:
    if value.single_file and len(value.files) != 1:
        raise UndecodableError(f"{len(value.files)} files are not the single file that it speaks of")
    return RankManifest(
        info=info,
        rank=value.rank,
        saved_at=value.saved_at,
        files=keep(_decode_files(info, value)),
        single_file=value.single_file,
        pack_sizes_bytes=tuple(pack.size for pack in value.packs),
    )


def _decode_files(info: SaveInfo, value: _Rank) -> Iterator[FileEntry]:
    """Decode the files one by one. Raises UndecodableError if they are too large together, or one cannot be."""
    owners = [(check_token(one.name, "owner"), check_token(one.save, "owner"), one.rank) for one in value.owners]
    pack_sizes_bytes = {number: pack.size for number, pack in enumerate(value.packs)}
    size_bytes = 0
    for raw in value.files:
        file = _decode_file(_FILE_DECODER.decode(raw), owners)
        if not info.is_snapshot and (file.owner or file.link or file.modified_ns is not None):
            raise UndecodableError(f"a {info.kind} save with a file of another save, a link or a time")
        if file.is_own and file.place:
            end_bytes = file.place.offset_bytes + file.size_bytes
            if end_bytes > pack_sizes_bytes.get(file.place.number, -1):
                raise UndecodableError(f"{file.path!r} does not lie in pack {file.place.number}")
        size_bytes += file.size_bytes
        if size_bytes > SAVE_BYTES:
            raise UndecodableError(f"files of {size_bytes:,} bytes, more than {SAVE_BYTES:,}")
        yield file


def commit_marker(ranks: Sequence[RankManifest], references: Iterable[ManifestReference]) -> CommitMarker:
    """Compute the marker of a save from all its ranks, and the references to the manifests that have them."""
    info = ranks[0].info
    assert sorted(one.rank for one in ranks) == list(range(info.world_size)), "a marker needs every rank"
    return CommitMarker(
        info=info,
        saved_at=max(one.saved_at for one in ranks),
        size_bytes=sum(one.size_bytes for one in ranks),
        file_count=sum(len(one.files) for one in ranks),
        manifests=tuple(sorted(references, key=lambda one: one.first_rank)),
    )


def encode_marker(marker: CommitMarker) -> bytes:
    return checked_json.encode(marker_object(marker))


def marker_object(marker: CommitMarker) -> MarkerObject:
    """Return what a commit marker says, to be encoded."""
    return MarkerObject(
        **_of_save(marker.info),
        format=_FORMAT_VERSION,
        saved_at=float(marker.saved_at),
        size=marker.size_bytes,
        file_count=marker.file_count,
        manifests=tuple(
            _Reference(
                first_rank=one.first_rank,
                rank_count=one.rank_count,
                size=one.size_bytes,
                checksum=f"{one.checksum:016x}",
            )
            for one in marker.manifests
        ),
    )


def decode_marker(body: bytes, key: str) -> CommitMarker:
    """Decode a commit marker. Raises StoreError(CHECKPOINT_CORRUPT or FORMAT_UNKNOWN) that names `key`."""
    try:
        return marker_of(checked_json.decode(body, MarkerObject, limit_bytes=MARKER_BYTES))
    except (UndecodableError, RequestError) as error:
        raise corrupt(key, error) from error


def marker_of(value: MarkerObject) -> CommitMarker:
    """Return the commit marker that was decoded. Raises UndecodableError or RequestError if it cannot be one."""
    if sum(one.rank_count for one in value.manifests) != value.world_size or any(
        one.first_rank >= following.first_rank for one, following in pairwise(value.manifests)
    ):
        raise UndecodableError("the marker does not name every rank once")
    manifests_bytes = sum(reference.size for reference in value.manifests)
    if manifests_bytes > MANIFESTS_BYTES:
        raise UndecodableError(f"manifests of {manifests_bytes:,} bytes, more than {MANIFESTS_BYTES:,}")
    return CommitMarker(
        info=_decode_info(value),
        saved_at=value.saved_at,
        size_bytes=value.size,
        file_count=value.file_count,
        manifests=tuple(
            ManifestReference(
                first_rank=one.first_rank,
                rank_count=one.rank_count,
                size_bytes=one.size,
                checksum=int(one.checksum, 16),
            )
            for one in value.manifests
        ),
    )


def _of_save(info: SaveInfo) -> dict[str, Any]:
    return {**asdict(info), "checksum": "crc64nvme"}


_Owners = Mapping[tuple[str, str, int], int]


def _encode_file(file: FileEntry, owners: _Owners) -> _File:
    owner = file.owner
    return _File(
        path=file.path,
        size=file.size_bytes,
        part_size=file.part_size_bytes,
        checksums=tuple(f"{checksum:016x}" for checksum in file.checksums),
        pack=file.place.number if file.place else None,
        offset=file.place.offset_bytes if file.place else None,
        owner=owners[owner.name, owner.save, owner.rank] if owner else None,
        owner_path=owner.path if owner and owner.path != file.path else "",
        modified_ns=file.modified_ns,
        link=file.link,
    )


def _decode_file(file: _File, owners: Sequence[tuple[str, str, int]]) -> FileEntry:
    if (file.pack is None) != (file.offset is None):
        raise UndecodableError(f"{file.path!r} has a pack or an offset without the other")
    if file.owner is not None and file.owner >= len(owners):
        raise UndecodableError(f"{file.path!r} names owner {file.owner} of {len(owners)}")
    if file.owner is None and file.owner_path:
        raise UndecodableError(f"{file.path!r} has an owner's path without an owner")
    if file.link and (file.size or file.owner is not None or file.pack is not None):
        raise UndecodableError(f"{file.path!r} is a link with bytes")
    if len(file.checksums) != -(-file.size // file.part_size):
        raise UndecodableError(f"{file.path!r}: {len(file.checksums)} checksums do not cover {file.size} bytes")
    return FileEntry(
        path=check_file_path(file.path),
        size_bytes=file.size,
        part_size_bytes=file.part_size,
        checksums=array("Q", (int(checksum, 16) for checksum in file.checksums)),
        place=None
        if file.pack is None or file.offset is None
        else PackPlace(number=file.pack, offset_bytes=file.offset),
        owner=None if file.owner is None else _owner(owners[file.owner], file),
        modified_ns=file.modified_ns,
        link=check_link(file.path, file.link) if file.link else "",
    )


def _owner(owner: tuple[str, str, int], file: _File) -> Owner:
    name, save, rank = owner
    return Owner(name=name, save=save, rank=rank, path=check_file_path(file.owner_path or file.path))


def _decode_info(value: _Save) -> SaveInfo:
    return SaveInfo(
        save=check_token(value.save, "save id"),
        name=check_token(value.name, "checkpoint name"),
        step=value.step,
        kind=value.kind,
        world_size=value.world_size,
        directory=check_directory(value.directory),
        output=check_directory(value.output),
    )


def corrupt(key: str, error: Exception) -> StoreError:
    """Return the error for an object that was not decoded, and say whether its format is too new."""
    if isinstance(error, UnknownFormatError):
        return StoreError(
            ErrorKind.FORMAT_UNKNOWN,
            f"{key} cannot be read: {error}",
            hint="use the version that wrote it, or a newer one",
        )
    return checkpoint_corrupt(f"{key} is not what was written: {error}")


_PROCESS_BYTES: Final = 96 * 1024**2
"""Everything else that is in memory at the same time: the program, parts and packs in transfer."""
_FILE_BYTES: Final = 500
"""For each file, listed and decoded, besides its bytes in the manifest."""
_KEPT_FACTOR: Final = 2
"""For each byte of a manifest: paths are kept in UTF-8, twice while they are compared."""
_DECODING_FACTOR: Final = 3
"""For each byte of the manifest that is being decoded. Only one is decoded at a time."""
_ENTRY_BYTES: Final = 110
"""For each file in a manifest, besides its path."""
_SNAPSHOT_ENTRY_BYTES: Final = 150
"""The same in a snapshot, which has the file's time and the save that stored it."""
_HELD_FILE_BYTES: Final = 120
"""For each file that is pinned, besides its bytes in a manifest to come: its columns, and its inode in an index."""
_PACK_FACTOR: Final = 2
"""For each byte of the largest pack, which is in memory twice while it arrives."""
_LITTLE_BYTES: Final = 2 * 1024**2
"""What needs no more besides the process, about a thousand files, is never refused: it makes no difference."""
_MIB: Final = 1024**2

HINT: Final = "raise its memory limit (`keepstep.dev/memory`), or save fewer and larger files"


def needed_bytes(*, files: int, manifests_bytes: Sequence[int] = (), largest_pack_bytes: int = 0) -> int:
    """Return the memory that a process needs to read manifests of these sizes with so many files."""
    return (
        _PROCESS_BYTES
        + _FILE_BYTES * files
        + _KEPT_FACTOR * sum(manifests_bytes)
        + _DECODING_FACTOR * max(manifests_bytes, default=0)
        + _PACK_FACTOR * largest_pack_bytes
    )


def held_bytes(*, files: int, manifest_bytes: int) -> int:
    """Return the memory of files that wait for their commit. Their manifest will have about so many bytes."""
    return _HELD_FILE_BYTES * files + manifest_bytes


def expected_manifest_bytes(paths: Iterable[str], *, is_snapshot: bool = False) -> int:
    """Return about how many bytes a manifest of these files will have, if none has many parts."""
    entry_bytes = _SNAPSHOT_ENTRY_BYTES if is_snapshot else _ENTRY_BYTES
    return sum(entry_bytes + len(path.encode()) for path in paths)


def largest_manifest_bytes(limit_bytes: int | None, most_bytes: int) -> int:
    """Return the size of the largest manifest that can be read alone, at most `most_bytes`."""
    if limit_bytes is None:
        return most_bytes
    left_bytes = max(limit_bytes - _PROCESS_BYTES, _LITTLE_BYTES)
    return min(most_bytes, left_bytes // (_KEPT_FACTOR + _DECODING_FACTOR + _FILE_BYTES // _ENTRY_BYTES))


def shortage(
    name: str,
    limit_bytes: int | None,
    *,
    files: int,
    manifests_bytes: Sequence[int] = (),
    largest_pack_bytes: int = 0,
    beside_bytes: int = 0,
) -> StoreError | None:
    """Return the error for a checkpoint whose manifests do not fit; None if they do, or are too little to count.

    It is not damaged, it only needs more memory. `beside_bytes`: what else is in memory.
    """
    needed = needed_bytes(files=files, manifests_bytes=manifests_bytes, largest_pack_bytes=largest_pack_bytes)
    more_bytes = needed - _PROCESS_BYTES - _PACK_FACTOR * largest_pack_bytes
    is_little = more_bytes <= _LITTLE_BYTES and largest_pack_bytes <= PACK_BYTES
    if limit_bytes is None or is_little or needed + beside_bytes <= limit_bytes:
        return None
    return StoreError(
        ErrorKind.MEMORY_SHORT,
        f"{name} needs {-(-(needed + beside_bytes) // _MIB):,} MiB of memory for its manifests, "
        f"this process may have {limit_bytes // _MIB:,} MiB: {HINT}",
        hint=HINT,
    )

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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Annotated, Any, Final, Literal

from msgspec import Meta, Struct

from keepstep_agent.core.errors import ErrorKind, RequestError, StoreError, checkpoint_corrupt
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
from keepstep_agent.core.stored.packs_and_parts import LARGEST_PACK_BYTES

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


class _Owner(StoredObject):
    name: str
    save: str
    rank: Rank


class _Pack(StoredObject):
    size: _PackBytes


class _Rank(StoredObject):
    rank: Rank
    saved_at: Moment
    files: Annotated[tuple[_File, ...], Meta(max_length=FILES_PER_RANK)]
    packs: Annotated[tuple[_Pack, ...], Meta(max_length=FILES_PER_RANK)] = ()
    single_file: bool = False
    owners: Annotated[tuple[_Owner, ...], Meta(max_length=FILES_PER_RANK)] = ()


class _Manifest(_Save, kw_only=True):
    format: Literal[1]
    ranks: Annotated[tuple[_Rank, ...], Meta(min_length=1, max_length=LOCAL_RANKS)]


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
    ordered = sorted(ranks, key=lambda one: one.rank)
    return checked_json.encode(
        _Manifest(**_of_save(ordered[0].info), format=_FORMAT_VERSION, ranks=tuple(map(_encode_rank, ordered)))
    )


def _encode_rank(manifest: RankManifest) -> _Rank:
    owners = sorted({(file.owner.name, file.owner.save, file.owner.rank) for file in manifest.files if file.owner})
    places = {owner: position for position, owner in enumerate(owners)}
    return _Rank(
        rank=manifest.rank,
        saved_at=float(manifest.saved_at),
        files=tuple(_encode_file(file, places) for file in manifest.files),
        packs=tuple(_Pack(size=size_bytes) for size_bytes in manifest.pack_sizes_bytes),
        single_file=manifest.single_file,
        owners=tuple(_Owner(name=name, save=save, rank=rank) for name, save, rank in owners),
    )


def decode_manifest(body: bytes, key: str) -> tuple[RankManifest, ...]:
    """Decode a manifest into its ranks, the lowest first.

    Raises StoreError(CHECKPOINT_CORRUPT or FORMAT_UNKNOWN) that names `key`.
    """
    try:
        value = checked_json.decode(body, _Manifest, limit_bytes=MANIFEST_BYTES)
        info = _decode_info(value)
        if any(one.rank >= following.rank for one, following in pairwise(value.ranks)):
            raise UndecodableError("its ranks are not in order")
        if value.ranks[-1].rank >= info.world_size:
            raise UndecodableError(f"rank {value.ranks[-1].rank} in a world of {info.world_size}")
        return tuple(_decode_rank(info, one) for one in value.ranks)
    except (UndecodableError, RequestError) as error:
        raise corrupt(key, error) from error


def _decode_rank(info: SaveInfo, value: _Rank) -> RankManifest:
    owners = [(check_token(one.name, "owner"), check_token(one.save, "owner"), one.rank) for one in value.owners]
    manifest = RankManifest(
        info=info,
        rank=value.rank,
        saved_at=value.saved_at,
        files=tuple(_decode_file(file, owners) for file in value.files),
        single_file=value.single_file,
        pack_sizes_bytes=tuple(pack.size for pack in value.packs),
    )
    if not info.is_snapshot and any(file.owner or file.link or file.modified_ns is not None for file in manifest.files):
        raise UndecodableError(f"a {info.kind} save with a file of another save, a link or a time")
    if manifest.single_file and len(manifest.files) != 1:
        raise UndecodableError(f"{len(manifest.files)} files are not the single file that it speaks of")
    _check_sizes(manifest)
    return manifest


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


def _check_sizes(manifest: RankManifest) -> None:
    """Raise UndecodableError if the files are too large together, or a packed file does not lie within its pack."""
    if manifest.size_bytes > SAVE_BYTES:
        raise UndecodableError(f"files of {manifest.size_bytes:,} bytes, more than {SAVE_BYTES:,}")
    sizes = dict(enumerate(manifest.pack_sizes_bytes))
    for file in manifest.files:
        if file.is_own and file.place and file.place.offset_bytes > sizes.get(file.place.number, -1) - file.size_bytes:
            raise UndecodableError(f"{file.path!r} does not lie in pack {file.place.number}")


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
_KEPT_FACTOR: Final = 6
"""For each byte of a manifest: a path is kept twice, and one wide character makes both copies take four bytes for each
character."""
_DECODING_FACTOR: Final = 8
"""For each byte of the manifest that is being decoded. Only one is decoded at a time."""
_PACK_FACTOR: Final = 2
"""For each byte of the largest pack, which is in memory twice while it arrives."""
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


def largest_manifest_bytes(limit_bytes: int | None, most_bytes: int) -> int:
    """Return the size of the largest manifest that can be read alone, at most `most_bytes`."""
    if limit_bytes is None:
        return most_bytes
    return max(0, min(most_bytes, (limit_bytes - _PROCESS_BYTES) // (_KEPT_FACTOR + _DECODING_FACTOR)))


def shortage(name: str, needed_bytes: int, limit_bytes: int) -> StoreError:
    """Return the error for a checkpoint whose manifests do not fit. It is not damaged, it only needs more memory."""
    return StoreError(
        ErrorKind.MEMORY_SHORT,
        f"{name} needs {-(-needed_bytes // _MIB):,} MiB of memory for its manifests, "
        f"this process may have {limit_bytes // _MIB:,} MiB: {HINT}",
        hint=HINT,
    )

"""Rank manifests and commit markers as JSON, both ways. One value has exactly one encoding.

Two committers must write the same bytes, so keys are sorted, separators fixed and the marker is computed from the
manifests alone. Decoding refuses what it does not understand: a checkpoint is restored only if every byte is accounted.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from mooring_agent.core.errors import ErrorKind, StoreError
from mooring_agent.core.model import (
    CommitMarker,
    FileEntry,
    Kind,
    ManifestReference,
    PackPlace,
    RankManifest,
    SaveInfo,
)
from mooring_agent.core.pack_plan import LARGEST_PACK_BYTES

FORMAT_VERSION: Final = 1
PACKED_FORMAT_VERSION: Final = 2
"""Of rank manifests with packs alone, so that a version that knows none refuses these and reads all others."""
CHECKSUM: Final = "crc64nvme"


def encode_manifest(manifest: RankManifest) -> bytes:
    return _encode(
        {
            "format": PACKED_FORMAT_VERSION if manifest.pack_sizes_bytes else FORMAT_VERSION,
            **_encode_info(manifest.info),
            "rank": manifest.rank,
            "saved_at": manifest.saved_at,
            "checksum": CHECKSUM,
            "files": [
                {
                    "path": file.path,
                    "size": file.size_bytes,
                    "part_size": file.part_size_bytes,
                    "checksums": [f"{checksum:016x}" for checksum in file.checksums],
                    **({"pack": file.place.number, "offset": file.place.offset_bytes} if file.place else {}),
                }
                for file in manifest.files
            ],
            **({"packs": [{"size": size} for size in manifest.pack_sizes_bytes]} if manifest.pack_sizes_bytes else {}),
            **({"single_file": True} if manifest.single_file else {}),
        }
    )


def decode_manifest(body: bytes, key: str) -> RankManifest:
    """Raises StoreError(CHECKPOINT_CORRUPT) that names `key`."""
    try:
        value = _decode(body, FORMAT_VERSION, PACKED_FORMAT_VERSION)
        manifest = RankManifest(
            info=_decode_info(value),
            rank=int(value["rank"]),
            saved_at=float(value["saved_at"]),
            files=tuple(
                FileEntry(
                    path=str(file["path"]),
                    size_bytes=int(file["size"]),
                    part_size_bytes=int(file["part_size"]),
                    checksums=tuple(int(checksum, 16) for checksum in file["checksums"]),
                    place=_decode_place(file),
                )
                for file in value["files"]
            ),
            single_file=bool(value.get("single_file", False)),
            pack_sizes_bytes=tuple(int(pack["size"]) for pack in value.get("packs", ())),
        )
        if manifest.single_file and len(manifest.files) != 1:
            raise ValueError(f"{len(manifest.files)} files are not the single file that it speaks of")
        for file in manifest.files:
            _check_numbers(file)
            if len(file.checksums) != -(-file.size_bytes // file.part_size_bytes):
                raise ValueError(f"{file.path}: {len(file.checksums)} checksums do not cover {file.size_bytes} bytes")
        if (value["format"] == PACKED_FORMAT_VERSION) != bool(manifest.pack_sizes_bytes):
            raise ValueError(f"format {value['format']} with {len(manifest.pack_sizes_bytes)} packs")
        _check_packs(manifest)
    except (ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        raise _corrupt(key, error) from error
    return manifest


def commit_marker(manifests: Sequence[RankManifest], references: Mapping[int, ManifestReference]) -> CommitMarker:
    """The marker of a save, from all its rank manifests and what is known of their encoded form."""
    ordered = sorted(manifests, key=lambda manifest: manifest.rank)
    info = ordered[0].info
    assert [manifest.rank for manifest in ordered] == list(range(info.world_size)), "a marker needs every rank"
    return CommitMarker(
        info=info,
        saved_at=max(manifest.saved_at for manifest in ordered),
        size_bytes=sum(manifest.size_bytes for manifest in ordered),
        file_count=sum(len(manifest.files) for manifest in ordered),
        manifests=tuple(references[manifest.rank] for manifest in ordered),
    )


def encode_marker(marker: CommitMarker) -> bytes:
    return _encode(
        {
            "format": FORMAT_VERSION,
            **_encode_info(marker.info),
            "saved_at": marker.saved_at,
            "size": marker.size_bytes,
            "file_count": marker.file_count,
            "checksum": CHECKSUM,
            "manifests": [
                {"rank": reference.rank, "size": reference.size_bytes, "checksum": f"{reference.checksum:016x}"}
                for reference in marker.manifests
            ],
        }
    )


def decode_marker(body: bytes, key: str) -> CommitMarker:
    """Raises StoreError(CHECKPOINT_CORRUPT) that names `key`."""
    try:
        value = _decode(body, FORMAT_VERSION)
        marker = CommitMarker(
            info=_decode_info(value),
            saved_at=float(value["saved_at"]),
            size_bytes=int(value["size"]),
            file_count=int(value["file_count"]),
            manifests=tuple(
                ManifestReference(
                    rank=int(reference["rank"]),
                    size_bytes=int(reference["size"]),
                    checksum=int(reference["checksum"], 16),
                )
                for reference in value["manifests"]
            ),
        )
        if [reference.rank for reference in marker.manifests] != list(range(marker.info.world_size)):
            raise ValueError("the marker does not name every rank once")
    except (ValueError, KeyError, TypeError) as error:
        raise _corrupt(key, error) from error
    return marker


def _encode(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode() + b"\n"


def _decode(body: bytes, *formats: int) -> dict[str, Any]:
    value = json.loads(body)
    if not isinstance(value, dict):
        raise TypeError("not a JSON object")
    if value.get("format") not in formats or value.get("checksum") != CHECKSUM:
        raise ValueError(f"format {value.get('format')!r} with checksum {value.get('checksum')!r} is not known here")
    return value


def _decode_place(file: Mapping[str, Any]) -> PackPlace | None:
    return PackPlace(number=int(file["pack"]), offset_bytes=int(file["offset"])) if "pack" in file else None


def _check_numbers(file: FileEntry) -> None:
    """Whoever compares two ranks' files computes with them."""
    numbers = (file.size_bytes, file.part_size_bytes, *file.checksums)
    if min(numbers) < 0 or max(numbers) >= 1 << 64:
        raise ValueError(f"{file.path}: a size or a checksum is no unsigned number of 64 bits")


def _check_packs(manifest: RankManifest) -> None:
    """Whoever reads takes a pack whole, and finds in it what the entries say."""
    if any(size > LARGEST_PACK_BYTES for size in manifest.pack_sizes_bytes):
        raise ValueError(f"a pack of more than {LARGEST_PACK_BYTES} bytes")
    sizes = dict(enumerate(manifest.pack_sizes_bytes))
    for file in manifest.files:
        place = file.place
        if place and not 0 <= place.offset_bytes <= sizes.get(place.number, -1) - file.size_bytes:
            raise ValueError(f"{file.path} does not lie in pack {place.number}")


def _encode_info(info: SaveInfo) -> dict[str, Any]:
    return {
        "save": info.save,
        "name": info.name,
        "step": info.step,
        "kind": info.kind.value,
        "world_size": info.world_size,
    }


def _decode_info(value: Mapping[str, Any]) -> SaveInfo:
    return SaveInfo(
        save=str(value["save"]),
        name=str(value["name"]),
        step=int(value["step"]),
        kind=Kind(value["kind"]),
        world_size=int(value["world_size"]),
    )


def _corrupt(key: str, error: Exception) -> StoreError:
    return StoreError(
        ErrorKind.CHECKPOINT_CORRUPT,
        f"{key} is not what was written: {error}",
        hint="restore falls back to the next older checkpoint; `mooring verify` shows all that is damaged",
    )

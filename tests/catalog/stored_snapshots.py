"""Writes snapshots into any store, as the agent does: what has not changed since the base stays with its owner."""

import random
import tarfile
from collections.abc import Collection, Mapping
from dataclasses import replace
from io import BytesIO

from tests.restore.stored_checkpoints import PART_BYTES, reference_of

from keepstep_agent.adapters.checksum import crc64nvme
from keepstep_agent.core.model import (
    FileEntry,
    Kind,
    Owner,
    PackPlace,
    RankManifest,
    SaveInfo,
    SnapshotId,
)
from keepstep_agent.core.stored.manifest import commit_marker, encode_manifest, encode_marker
from keepstep_agent.core.stored.object_layout import base_key, file_key, manifest_key, marker_key, pack_key
from keepstep_agent.core.stored.reservation import encode_reservation
from keepstep_agent.ports import StoreWriter


def output(**versions: int) -> dict[str, bytes]:
    """Files of an output directory, of several parts each. A file has other bytes in each version."""
    return {
        f"out/{name}.pt": random.Random(f"{name}/{version}").randbytes(2 * PART_BYTES + 33)
        for name, version in versions.items()
    }


def snapshot_info(number: int, *, series: str = "node-0", save: str = "") -> SaveInfo:
    save = save or f"0123abcd-{series[-1]}{number:05d}"
    return SaveInfo(save=save, name=series, step=number, kind=Kind.SNAPSHOT, world_size=1)


def snapshot_id(manifest: RankManifest) -> SnapshotId:
    info = manifest.info
    return SnapshotId(series=info.name, number=info.step, save=info.save)


def snapshot_of(
    info: SaveInfo,
    files: Mapping[str, bytes],
    *,
    base: RankManifest | None = None,
    links: Mapping[str, str] | None = None,
    packed: Collection[str] = (),
    saved_at: float = 1000.0,
) -> tuple[RankManifest, dict[str, bytes]]:
    """The manifest of a snapshot, and the objects that it stores besides that."""
    held = {file.path: _owned(file, base) for file in base.files if not file.link} if base else {}
    entries, objects = [], {}
    archive, offsets = _archive({path: files[path] for path in packed if path in files})
    for path, body in sorted(files.items()):
        entry = _entry(path, body)
        if path in held and held[path].has_bytes_of(entry):
            entries.append(held[path])
        elif path in packed:
            entries.append(replace(entry, place=PackPlace(number=0, offset_bytes=offsets[path])))
            objects[pack_key(info, 0, 0)] = archive
        else:
            entries.append(entry)
            objects[file_key(info, path)] = body
    entries += [
        FileEntry(path=path, size_bytes=0, part_size_bytes=1, checksums=(), link=target)
        for path, target in (links or {}).items()
    ]
    packs = (len(archive),) if pack_key(info, 0, 0) in objects else ()
    manifest = RankManifest(info=info, rank=0, saved_at=saved_at, files=tuple(entries), pack_sizes_bytes=packs)
    return manifest, objects


async def store_snapshot(
    store: StoreWriter,
    number: int,
    files: Mapping[str, bytes],
    *,
    base: RankManifest | None = None,
    links: Mapping[str, str] | None = None,
    packed: Collection[str] = (),
    series: str = "node-0",
    save: str = "",
    saved_at: float = 1000.0,
    committed: bool = True,
) -> RankManifest:
    info = snapshot_info(number, series=series, save=save)
    manifest, objects = snapshot_of(info, files, base=base, links=links, packed=packed, saved_at=saved_at)
    if base:
        await store.put(base_key(info), encode_reservation(snapshot_id(base)))
    for key, body in objects.items():
        await store.put(key, body)
    await store.put(manifest_key(info, 0, 1), encode_manifest([manifest]))
    if committed:
        await commit(store, manifest)
    return manifest


async def commit(store: StoreWriter, manifest: RankManifest) -> None:
    """Store the marker. It fits the manifest, whatever that says."""
    reference = reference_of([manifest], encode_manifest([manifest]))
    await store.put(marker_key(manifest.info), encode_marker(commit_marker([manifest], [reference])))


async def forge(store: StoreWriter, manifest: RankManifest) -> None:
    """Replace a snapshot's manifest, and its marker to fit."""
    await store.put(manifest_key(manifest.info, 0, 1), encode_manifest([manifest]))
    await commit(store, manifest)


def _owned(file: FileEntry, base: RankManifest) -> FileEntry:
    info = base.info
    owner = file.owner or Owner(name=info.name, save=info.save, rank=0, path=file.path)
    return replace(file, owner=owner)


def _entry(path: str, body: bytes) -> FileEntry:
    pieces = [body[at : at + PART_BYTES] for at in range(0, len(body), PART_BYTES)]
    return FileEntry(
        path=path,
        size_bytes=len(body),
        part_size_bytes=PART_BYTES,
        checksums=tuple(crc64nvme(piece) for piece in pieces),
        modified_ns=1_700_000_000_123_456_789,
    )


def _archive(files: Mapping[str, bytes]) -> tuple[bytes, dict[str, int]]:
    stream = BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for path, body in sorted(files.items()):
            entry = tarfile.TarInfo(path)
            entry.size = len(body)
            archive.addfile(entry, BytesIO(body))
    with tarfile.open(fileobj=BytesIO(stream.getvalue())) as archive:
        return stream.getvalue(), {member.name: member.offset_data for member in archive}

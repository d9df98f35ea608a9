"""Writes committed checkpoints into any store, as the agent does, and damages them."""

import math
import random
import tarfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from io import BytesIO

from keepstep_agent.adapters.checksum import crc64nvme
from keepstep_agent.core.model import FileEntry, Kind, ManifestReference, PackPlace, RankManifest, SaveInfo
from keepstep_agent.core.stored.commit import manifest_key_of
from keepstep_agent.core.stored.manifest import commit_marker, encode_manifest, encode_marker
from keepstep_agent.core.stored.object_layout import file_key, manifest_key, marker_key, pack_key
from keepstep_agent.ports import ObjectStore, StoreWriter

PART_BYTES = 64 * 1024


def rank_files(step: int, rank: int = 0) -> dict[str, bytes]:
    """Files as a trainer leaves them: several parts, one part, a folder, an empty file; other bytes at each step."""
    generator = random.Random(f"{step}/{rank}")
    return {
        f"model-{rank}.safetensors": generator.randbytes(5 * PART_BYTES + 77),
        f"optimizer/state-{rank}.pt": generator.randbytes(PART_BYTES),
        f"rng_state_{rank}.pth": generator.randbytes(100),
        f"empty-{rank}": b"",
    }


def all_files(step: int, ranks: int = 1) -> dict[str, bytes]:
    return {path: body for rank in range(ranks) for path, body in rank_files(step, rank).items()}


async def store_checkpoint(
    store: ObjectStore,
    step: int,
    *,
    save: str = "",
    saved_at: float | None = None,
    ranks: Sequence[Mapping[str, bytes]] = (),
    world_size: int = 1,
    committed: bool = True,
    name: str = "",
    directory: str = "",
    output: str = "",
    kind: Kind = Kind.PERIODIC,
    single_file: bool = False,
    part_sizes_bytes: Mapping[int, int] | None = None,
) -> SaveInfo:
    """Files, manifests and, if `committed`, the marker. `ranks` are the files of each rank; each has its own agent.

    `single_file`: whoever has a file announced that file itself. `part_sizes_bytes`: by rank, if not `PART_BYTES`.
    `saved_at`: if not now, by the clock of a store that has one of its own.
    """
    if saved_at is None:
        # In whole seconds, so that a manifest's size does not change with the time.
        saved_at = getattr(store, "now", float(math.ceil(time.time())))
    ranks = ranks or [rank_files(step, rank) for rank in range(world_size)]
    info = SaveInfo(
        save=save or f"0123abcd-{step:06d}",
        name=name or f"checkpoint-{step}",
        step=step,
        kind=kind,
        world_size=len(ranks),
        directory=directory,
        output=output,
    )
    manifests = []
    for rank, files in enumerate(ranks):
        for path, body in files.items():
            await store.put(file_key(info, path), body)
        part_size_bytes = (part_sizes_bytes or {}).get(rank, PART_BYTES)
        entries = tuple(file_entry(path, body, part_size_bytes) for path, body in files.items())
        manifest = RankManifest(
            info=info, rank=rank, saved_at=saved_at, files=entries, single_file=single_file and bool(entries)
        )
        manifests.append([manifest])
    await store_ranks(store, manifests, committed=committed)
    return info


async def store_ranks(
    store: StoreWriter, agents: Sequence[Sequence[RankManifest]], *, committed: bool = True
) -> list[ManifestReference]:
    """Store the manifests of agents that have these ranks, and, if `committed`, the marker that names them."""
    references = []
    for ranks in agents:
        encoded = encode_manifest(ranks)
        await store.put(manifest_key_of(ranks), encoded)
        references.append(reference_of(ranks, encoded))
    if committed:
        ranks = [one for together in agents for one in together]
        await store.put(marker_key(ranks[0].info), encode_marker(commit_marker(ranks, references)))
    return references


def reference_of(ranks: Sequence[RankManifest], encoded: bytes) -> ManifestReference:
    return ManifestReference(
        first_rank=min(one.rank for one in ranks),
        rank_count=len(ranks),
        size_bytes=len(encoded),
        checksum=crc64nvme(encoded),
    )


def file_entry(path: str, body: bytes, part_size_bytes: int = PART_BYTES) -> FileEntry:
    pieces = [body[at : at + part_size_bytes] for at in range(0, len(body), part_size_bytes)]
    return FileEntry(
        path=path,
        size_bytes=len(body),
        part_size_bytes=part_size_bytes,
        checksums=tuple(crc64nvme(piece) for piece in pieces),
    )


_FILES_PER_PACK = 40


async def store_packed_checkpoint(
    store: ObjectStore, step: int, *, alone: Mapping[str, bytes], packed: Mapping[str, bytes]
) -> SaveInfo:
    """One rank's, committed: files that are objects, and files in packs made by the standard library."""
    info = SaveInfo(save=f"0123abcd-{step:06d}", name=f"checkpoint-{step}", step=step, kind=Kind.PERIODIC, world_size=1)
    for path, body in alone.items():
        await store.put(file_key(info, path), body)
    entries = [file_entry(path, body) for path, body in alone.items()]
    sizes = []
    for number, paths in enumerate(_in_batches(sorted(packed))):
        archive, offsets = tar_of({path: packed[path] for path in paths})
        await store.put(pack_key(info, 0, number), archive)
        sizes.append(len(archive))
        entries += [
            replace(file_entry(path, packed[path]), place=PackPlace(number=number, offset_bytes=offsets[path]))
            for path in paths
        ]
    manifest = RankManifest(info=info, rank=0, saved_at=1000.0, files=tuple(entries), pack_sizes_bytes=tuple(sizes))
    await store_ranks(store, [[manifest]])
    return info


def _in_batches(paths: Sequence[str]) -> list[Sequence[str]]:
    return [paths[at : at + _FILES_PER_PACK] for at in range(0, len(paths), _FILES_PER_PACK)]


def tar_of(files: Mapping[str, bytes]) -> tuple[bytes, dict[str, int]]:
    stream = BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for path, body in files.items():
            entry = tarfile.TarInfo(path)
            entry.size = len(body)
            archive.addfile(entry, BytesIO(body))
    with tarfile.open(fileobj=BytesIO(stream.getvalue())) as archive:
        return stream.getvalue(), {member.name: member.offset_data for member in archive}


async def flip_byte(store: ObjectStore, key: str, position: int) -> None:
    body = bytearray(await store.get(key, limit_bytes=1 << 30))
    body[position] ^= 1
    await store.put(key, bytes(body))


async def truncate(store: ObjectStore, key: str) -> None:
    await store.put(key, (await store.get(key, limit_bytes=1 << 30))[:-1])


DAMAGE = {
    "a flipped byte": lambda store, info: flip_byte(store, file_key(info, "model-0.safetensors"), 3 * PART_BYTES + 5),
    "a truncated object": lambda store, info: truncate(store, file_key(info, "model-0.safetensors")),
    "a missing file": lambda store, info: store.delete(file_key(info, "rng_state_0.pth")),
    "a missing empty file": lambda store, info: store.delete(file_key(info, "empty-0")),
    "a missing manifest": lambda store, info: store.delete(manifest_key(info, 0, 1)),
    "a changed manifest": lambda store, info: flip_byte(store, manifest_key(info, 0, 1), 40),
    "a truncated manifest": lambda store, info: truncate(store, manifest_key(info, 0, 1)),
    "a garbage marker": lambda store, info: store.put(marker_key(info), b"\x00garbage"),
    "an empty marker": lambda store, info: store.put(marker_key(info), b""),
    "an extra rank": lambda store, info: store.put(manifest_key(info, 1, 1), b"{}"),
}
"""What can be wrong with a checkpoint of one rank -> how to make it so."""

DAMAGED_OBJECT = {
    "a flipped byte": "model-0.safetensors",
    "a truncated object": "model-0.safetensors",
    "a missing file": "rng_state_0.pth",
    "a missing empty file": "empty-0",
    "a missing manifest": "manifest-00000-00001.json",
    "a changed manifest": "manifest-00000-00001.json",
    "a truncated manifest": "manifest-00000-00001.json",
    "a garbage marker": ".keepstep/commits/",
    "an empty marker": ".keepstep/commits/",
    "an extra rank": "manifest-00001-00001.json",
}
"""What can be wrong -> what a message about it has to name."""

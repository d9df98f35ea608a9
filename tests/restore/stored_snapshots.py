"""Writes committed snapshots into any store, as the agent does: own files, files of earlier snapshots, packs, links."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace

from tests.restore.stored_checkpoints import PART_BYTES, file_entry, store_ranks, tar_of

from keepstep_agent.core.model import FileEntry, Kind, Owner, PackPlace, RankManifest, SaveInfo
from keepstep_agent.core.stored.object_layout import file_key, pack_key
from keepstep_agent.ports import ObjectStore

SECOND_NS = 10**9
FIRST_NS = 1_700_000_000 * SECOND_NS + 123_456_700
"""When the oldest file was written. Each of the following files is a second newer."""


def body(path: str, version: int = 0, size_bytes: int = PART_BYTES + 77) -> bytes:
    """Bytes that no other path or version has, in two parts."""
    return random.Random(f"{path}/{version}").randbytes(size_bytes)


@dataclass(frozen=True)
class StoredSnapshot:
    """A snapshot at a destination, with its entries by path."""

    info: SaveInfo
    entries: Mapping[str, FileEntry]

    def kept(self, path: str) -> FileEntry:
        """The entry of a file as a later snapshot names it that has not sent it again."""
        entry = self.entries[path]
        owner = Owner(name=self.info.name, save=self.info.save, rank=0, path=path)
        return entry if entry.owner else replace(entry, owner=owner)


async def store_snapshot(
    store: ObjectStore,
    number: int,
    files: Mapping[str, bytes],
    *,
    node_rank: int = 0,
    save: str = "",
    packed: Mapping[str, bytes] | None = None,
    kept: Mapping[str, FileEntry] | None = None,
    links: Mapping[str, str] | None = None,
    modified_ns: Mapping[str, int] | None = None,
) -> StoredSnapshot:
    """Store a committed snapshot. Files that `modified_ns` does not name were written in the order given."""
    name = f"node-{node_rank}"
    info = SaveInfo(save=save or f"{name}-{number}", name=name, step=number, kind=Kind.SNAPSHOT, world_size=1)
    for path, content in files.items():
        await store.put(file_key(info, path), content)
    entries = {path: file_entry(path, content) for path, content in files.items()}
    sizes: tuple[int, ...] = ()
    if packed:
        whole, offsets = tar_of(packed)
        await store.put(pack_key(info, 0, 0), whole)
        sizes = (len(whole),)
        for path, content in packed.items():
            place = PackPlace(number=0, offset_bytes=offsets[path])
            entries[path] = replace(file_entry(path, content), place=place)
    for path, target in (links or {}).items():
        entries[path] = replace(file_entry(path, b""), link=target)
    times = {path: FIRST_NS + position * SECOND_NS for position, path in enumerate(entries)} | dict(modified_ns or {})
    entries = {path: replace(entry, modified_ns=times[path]) for path, entry in entries.items()} | dict(kept or {})
    manifest = RankManifest(
        info=info, rank=0, saved_at=float(number), files=tuple(entries.values()), pack_sizes_bytes=sizes
    )
    await store_ranks(store, [[manifest]])
    return StoredSnapshot(info=info, entries=entries)


FILES = {path: body(path) for path in ("out/ckpt.pt", "out/run-1/model.bin", "out/run-1/logs/train.log", "out/empty")}
FILES["out/empty"] = b""


def below(label: str, files: dict[str, bytes]) -> dict[str, bytes]:
    """The files of one output directory, by their paths in it."""
    return {path.removeprefix(f"{label}/"): held for path, held in files.items() if path.startswith(f"{label}/")}

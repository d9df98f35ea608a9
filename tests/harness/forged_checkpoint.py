"""Forged checkpoints whose manifests take much memory, beside real ones: all within the limits of their form."""

from collections.abc import Callable, Mapping
from typing import Final

from tests.restore.stored_checkpoints import store_ranks

from keepstep_agent.core.model import FileEntry, Kind, PackPlace, RankManifest, SaveInfo
from keepstep_agent.core.stored.object_layout import file_key, pack_key
from keepstep_agent.ports import ObjectStore

PARTS: Final = 10_000
_PACK_BYTES: Final = 1024
_CHECKSUM: Final = 0x0123456789ABCDEF


def of_parts(number: int) -> FileEntry:
    """A file of ten thousand parts of a byte."""
    checksums = tuple(_CHECKSUM + part for part in range(PARTS))
    return FileEntry(path=f"file-{number}", size_bytes=PARTS, part_size_bytes=1, checksums=checksums)


def of_nothing(number: int) -> FileEntry:
    """An empty file that lies in a pack."""
    place = PackPlace(number=0, offset_bytes=_PACK_BYTES)
    return FileEntry(path=f"f/{number}", size_bytes=0, part_size_bytes=1, checksums=(), place=place)


def of_wide_names(number: int) -> FileEntry:
    """One of whose names one character makes each take four bytes."""
    place = PackPlace(number=0, offset_bytes=_PACK_BYTES)
    path = f"{number}\U0001f40b/{'a' * 230}/{'a' * 230}"
    return FileEntry(path=path, size_bytes=0, part_size_bytes=1, checksums=(), place=place)


SHAPES: Final[Mapping[str, Callable[[int], FileEntry]]] = {
    "many parts": of_parts,
    "many empty files": of_nothing,
    "wide names": of_wide_names,
}


async def store_forged(
    store: ObjectStore, step: int, entry: Callable[[int], FileEntry], *, files_of_rank: int, ranks: int
) -> list[int]:
    """Commit it, as someone who may write to the bucket does; the sizes of its manifests, one for each rank."""
    info = SaveInfo(
        save=f"f0f0f0f0-{step:06d}", name=f"checkpoint-{step}", step=step, kind=Kind.PERIODIC, world_size=ranks
    )
    manifests = []
    for rank in range(ranks):
        files = tuple(entry(rank * files_of_rank + number) for number in range(files_of_rank))
        packs = (_PACK_BYTES,) if any(file.place for file in files) else ()
        manifest = RankManifest(info=info, rank=rank, saved_at=1.0, files=files, pack_sizes_bytes=packs)
        for number, size_bytes in enumerate(packs):
            await store.put(pack_key(info, rank, number), bytes(size_bytes))
        for file in files:
            if not file.place:
                await store.put(file_key(info, file.path), bytes(file.size_bytes))
        manifests.append([manifest])
    return [reference.size_bytes for reference in await store_ranks(store, manifests)]

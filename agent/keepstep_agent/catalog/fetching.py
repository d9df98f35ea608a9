"""Fetches the bytes of a checkpoint: parts of a file into a descriptor, a pack of small files into memory.

Both raise an error unless the bytes are what was written.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from keepstep_agent.adapters.checksum import crc64nvme, joined_crc64nvme
from keepstep_agent.catalog.object_reads import at_once, get_whole
from keepstep_agent.catalog.reading import StoredFile
from keepstep_agent.core.errors import checkpoint_corrupt
from keepstep_agent.core.file_lists import Selected
from keepstep_agent.core.model import Part
from keepstep_agent.ports import StoreReader

PACKS_AT_ONCE: Final = 4
"""How many packs may be in memory. Each is there twice while it arrives."""
# The second fetch tells a bit flipped on the way from one flipped in the store.
_FETCHES: Final = 2
_TOGETHER_BYTES: Final = 32 * 1024**2
"""The bytes of packs fetched at a time: enough for four as the agent makes them. The largest come one at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPack:
    """The object that holds `files`. There is at least one."""

    key: str
    size_bytes: int
    files: Selected[StoredFile]

    @property
    def content_bytes(self) -> int:
        """Bytes of the files alone."""
        return sum(file.entry.size_bytes for file in self.files)

    def content(self, body: bytes, file: StoredFile) -> memoryview:
        """Return a file's bytes out of the pack's."""
        place = file.entry.place
        assert place is not None, file.entry.path
        return memoryview(body)[place.offset_bytes : place.offset_bytes + file.entry.size_bytes]


def packs_of(files: Sequence[StoredFile]) -> tuple[StoredPack, ...]:
    """Return the packs that hold those of the files that are packed."""
    packed: dict[str, tuple[int, array[int]]] = {}
    for position, file in enumerate(files):
        if file.entry.place:
            packed.setdefault(file.key, (file.object_bytes, array("I")))[1].append(position)
    return tuple(
        StoredPack(key=key, size_bytes=size_bytes, files=Selected(files, positions))
        for key, (size_bytes, positions) in packed.items()
    )


def packs_at_once(packs: Iterable[StoredPack], *, most: int) -> int:
    sizes = [pack.size_bytes for pack in packs]
    return at_once(sizes, most=min(most, PACKS_AT_ONCE), together_bytes=_TOGETHER_BYTES)


async def fetch_pack(store: StoreReader, pack: StoredPack) -> bytes:
    """Return the pack's bytes.

    Raises StoreError(CHECKPOINT_CORRUPT), which names the object and its first damaged file, if they are wrong.
    """
    for _ in range(_FETCHES):
        # An object that is larger than listed is damaged too.
        body = await get_whole(store, pack.key, limit_bytes=pack.size_bytes)
        damaged = [file.entry.path for file in pack.files if not _is_intact(pack.content(body, file), file)]
        if not damaged:
            return body
    more = f" (and {len(damaged) - 1} more)" if len(damaged) > 1 else ""
    raise checkpoint_corrupt(f"{pack.key} does not hold {damaged[0]} as it was written{more}")


def _is_intact(content: memoryview, file: StoredFile) -> bool:
    """Check the size too: an object that has become shorter yields fewer bytes."""
    return len(content) == file.entry.size_bytes and all(
        crc64nvme(content[part.offset_bytes : part.offset_bytes + part.size_bytes])
        == file.entry.checksums[part.number - 1]
        for part in file.entry.parts()
    )


async def fetch_part(store: StoreReader, file: StoredFile, part: Part, descriptor: int) -> None:
    """Write the part to its offset in `descriptor`.

    Raises StoreError(CHECKPOINT_CORRUPT), which names the object, if the bytes are wrong.
    """
    expected = file.entry.checksums[part.number - 1]
    for _ in range(_FETCHES):
        checksum = await store.get_into(
            file.key,
            offset_bytes=part.offset_bytes,
            size_bytes=part.size_bytes,
            version=file.version,
            descriptor=descriptor,
        )
        if checksum == expected:
            return
    raise checkpoint_corrupt(
        f"{file.key} bytes {part.offset_bytes} to {part.offset_bytes + part.size_bytes} are not what was written: "
        f"checksum {checksum:016x}, the manifest says {expected:016x}"
    )


async def fetch_parts(store: StoreReader, file: StoredFile, parts: Sequence[Part], descriptor: int) -> None:
    """Write parts that follow each other, with one request if all are what was written. Errors as `fetch_part`."""
    if len(parts) > 1:
        expected = 0
        for part in parts:
            expected = joined_crc64nvme(expected, file.entry.checksums[part.number - 1], part.size_bytes)
        checksum = await store.get_into(
            file.key,
            offset_bytes=parts[0].offset_bytes,
            size_bytes=sum(part.size_bytes for part in parts),
            version=file.version,
            descriptor=descriptor,
        )
        if checksum == expected:
            return
    # One by one they show which of them is damaged, and whether it was only so on the way.
    for part in parts:
        await fetch_part(store, file, part, descriptor)

"""Many small files -> packs: one object each, a tar archive that any tool unpacks. docs/design/0010 says why.

Owns the arithmetic only: which files are packed, in what order, and where each lies. Invariant: the same arguments give
the same plan in every version, for journals tell of packs by their numbers alone; what is a matter of taste today, the
size of a pack, is an argument.
"""

from collections.abc import Sequence
from typing import Final

from mooring_agent.core.model import Pack, StagedFile

PACK_BYTES: Final = 4 * 1024 * 1024
"""A pack's size, of new saves: 40 files of 100 KiB for each request, and little enough to be put together in memory."""
LARGEST_PACK_BYTES: Final = 64 * 1024 * 1024
"""Part of the format: a reader takes a whole pack into memory, and refuses a larger one."""
HEADER_BYTES: Final = 512
"""In front of each file, whose bytes are then filled up to a multiple of it."""

_MOST_FILES_ALONE: Final = 64
"""Of so few small files each is an object of its own, which people find by its name."""
_LARGEST_FILE_BYTES: Final = 1024 * 1024
"""From here on a request costs little beside the bytes that it carries."""
_END_BYTES: Final = 2 * HEADER_BYTES
_NAME_BYTES: Final = 100
_PREFIX_BYTES: Final = 155


def plan_packs(files: Sequence[StagedFile], pack_size_bytes: int) -> tuple[Pack, ...]:
    """The packs of one rank's files; none if it has few small ones, or `pack_size_bytes` is 0."""
    small = [file for file in files if file.size_bytes <= _LARGEST_FILE_BYTES and fits_header(file.path)]
    if not pack_size_bytes or len(small) <= _MOST_FILES_ALONE:
        return ()
    packs: list[Pack] = []
    gathered: list[StagedFile] = []
    offsets_bytes: list[int] = []
    end_bytes = 0
    for file in small:
        needed_bytes = HEADER_BYTES + padded(file.size_bytes)
        if gathered and end_bytes + needed_bytes + _END_BYTES > pack_size_bytes:
            packs.append(_pack(len(packs), gathered, offsets_bytes, end_bytes))
            gathered, offsets_bytes, end_bytes = [], [], 0
        gathered.append(file)
        offsets_bytes.append(end_bytes + HEADER_BYTES)
        end_bytes += needed_bytes
    packs.append(_pack(len(packs), gathered, offsets_bytes, end_bytes))
    return tuple(packs)


def padded(size_bytes: int) -> int:
    """As a tar archive holds so many bytes."""
    return -(-size_bytes // HEADER_BYTES) * HEADER_BYTES


def fits_header(path: str) -> bool:
    """Whether one plain ustar header can name it: 100 bytes, or as many below a folder of at most 155."""
    encoded = path.encode()
    if len(encoded) <= _NAME_BYTES:
        return True
    folder_end = encoded.rfind(b"/", 0, _PREFIX_BYTES + 1)
    return folder_end > 0 and len(encoded) - folder_end - 1 <= _NAME_BYTES


def _pack(number: int, files: list[StagedFile], offsets_bytes: list[int], end_bytes: int) -> Pack:
    return Pack(
        number=number, files=tuple(files), offsets_bytes=tuple(offsets_bytes), size_bytes=end_bytes + _END_BYTES
    )

"""Splits large files into parts and groups small files into packs. Arithmetic only.

A part fits S3's limits; a file no larger than one part is sent by a single PUT. A pack is one object that holds many
small files, a tar archive that any tool unpacks (docs/design/0010). Invariant: the same arguments give the same plan
in every version, because journals refer to parts and packs by number alone.

The part size is chosen when a checkpoint is staged, recorded with its pins, and fixed from then on. Two agents may
choose differently for the same file. A slow network gets smaller parts, because the parts in flight delay the next
checkpoint, and are lost when a request breaks or a just-in-time save cancels them. A fast network gets larger ones: a
request costs the event loop milliseconds, however much it carries, and it has only so many of them per second. They
grow no further than a checkpoint of the expected size still keeps all connections busy. The rate is what all
connections achieve together. After many small files it may be too low, so it makes parts smaller only once it was
measured for two seconds; parts that do not grow cost some CPU until parts are measured.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from keepstep_agent.core.file_lists import Selected, StagedFiles
from keepstep_agent.core.limits import PARTS_PER_FILE
from keepstep_agent.core.model import Part, StagedFile

MIN_PART_BYTES: Final = 5 * 1024 * 1024
_GRANULE_BYTES: Final = 1024 * 1024
# Below it the overhead of the requests begins to count.
_LEAST_PREFERRED_BYTES: Final = 8 * 1024 * 1024
_LONGEST_WINDOW_SECONDS: Final = 5.0
_SHORTEST_WINDOW_SECONDS: Final = 1.0
_MOST_TIMES: Final = 4
"""How much larger than configured parts may become. More would save the event loop little."""
_LARGEST_PREFERRED_BYTES: Final = 1024 * 1024 * 1024
_LEAST_WINDOWS: Final = 4
"""How many windows of larger parts a checkpoint has at least: with few, most connections wait for the last ones."""


def preferred_part_size(
    configured_bytes: int, bytes_per_second: float, window: int, *, is_certain: bool, expected_bytes: int
) -> int:
    """Return the configured size, halved or doubled until it takes 1 to 5 seconds to send a window of parts.

    It becomes no smaller than 8 MiB, and smaller only if the rate `is_certain`. It becomes no larger than four times
    the configured size, and larger only if a checkpoint of `expected_bytes` has four windows of such parts.
    `bytes_per_second` is the upload rate of the whole window; 0: nothing was measured.
    """
    size_bytes = configured_bytes
    while (
        is_certain
        and size_bytes // 2 >= _LEAST_PREFERRED_BYTES
        and 0 < bytes_per_second * _LONGEST_WINDOW_SECONDS < size_bytes * window
    ):
        size_bytes //= 2
    fitting_bytes = expected_bytes // (window * _LEAST_WINDOWS)
    most_bytes = min(configured_bytes * _MOST_TIMES, _LARGEST_PREFERRED_BYTES, fitting_bytes)
    while size_bytes * 2 <= most_bytes and size_bytes * window < bytes_per_second * _SHORTEST_WINDOW_SECONDS:
        size_bytes *= 2
    return size_bytes


def part_size_for(size_bytes: int, preferred_bytes: int) -> int:
    """Return the bytes per part: the preferred size, grown in whole MiB for a file of more than 10,000 such parts."""
    needed = -(-size_bytes // PARTS_PER_FILE)
    grown = -(-needed // _GRANULE_BYTES) * _GRANULE_BYTES
    return max(preferred_bytes, grown, MIN_PART_BYTES)


def plan(size_bytes: int, part_size_bytes: int) -> tuple[Part, ...]:
    """Return the parts of a file in order; none for an empty file."""
    return tuple(
        Part(number=index + 1, offset_bytes=offset, size_bytes=min(part_size_bytes, size_bytes - offset))
        for index, offset in enumerate(range(0, size_bytes, part_size_bytes))
    )


PACK_BYTES: Final = 4 * 1024 * 1024
"""The size of packs of new saves: 40 files of 100 KiB per request, and small enough to be assembled in memory."""
LARGEST_PACK_BYTES: Final = 64 * 1024 * 1024
"""Part of the format: a reader loads a whole pack into memory, and refuses a larger one."""
HEADER_BYTES: Final = 512
"""The size of the header before each file. The file's bytes are padded to a multiple of it."""

_MOST_FILES_ALONE: Final = 64
"""Up to so many small files are objects of their own, which people find by their names."""
_LARGEST_FILE_BYTES: Final = 1024 * 1024
"""Larger files are not packed: a request costs little compared with the bytes that it carries."""
_END_BYTES: Final = 2 * HEADER_BYTES
_NAME_BYTES: Final = 100
_PREFIX_BYTES: Final = 155


@dataclass(frozen=True, slots=True, kw_only=True)
class Pack:
    """Small files of one rank that are stored as one object, a tar archive of `size_bytes`.

    `number` counts from 0 within the rank. The bytes of `files[i]` begin at `offsets_bytes[i]` of the archive.
    """

    number: int
    files: Selected[StagedFile]
    offsets_bytes: Sequence[int]
    size_bytes: int


def plan_packs(files: StagedFiles, pack_size_bytes: int) -> tuple[Pack, ...]:
    """Return the packs of one rank's files; none if it has few small files, or `pack_size_bytes` is 0."""
    small = array(
        "I",
        (
            position
            for position, (path, size_bytes) in enumerate(zip(files.paths, files.sizes_bytes, strict=True))
            if size_bytes <= _LARGEST_FILE_BYTES and fits_header(path)
        ),
    )
    if not pack_size_bytes or len(small) <= _MOST_FILES_ALONE:
        return ()
    packs: list[Pack] = []
    gathered, offsets_bytes, end_bytes = array("I"), array("I"), 0
    for position in small:
        needed_bytes = HEADER_BYTES + padded(files.sizes_bytes[position])
        if gathered and end_bytes + needed_bytes + _END_BYTES > pack_size_bytes:
            packs.append(_pack(len(packs), files, gathered, offsets_bytes, end_bytes))
            gathered, offsets_bytes, end_bytes = array("I"), array("I"), 0
        gathered.append(position)
        offsets_bytes.append(end_bytes + HEADER_BYTES)
        end_bytes += needed_bytes
    packs.append(_pack(len(packs), files, gathered, offsets_bytes, end_bytes))
    return tuple(packs)


def padded(size_bytes: int) -> int:
    """Return how many bytes a tar archive takes for so many bytes of a file."""
    return -(-size_bytes // HEADER_BYTES) * HEADER_BYTES


def fits_header(path: str) -> bool:
    """Whether one plain ustar header can hold the path: 100 bytes, or as many below a folder of at most 155."""
    encoded = path.encode()
    if len(encoded) <= _NAME_BYTES:
        return True
    folder_end = encoded.rfind(b"/", 0, _PREFIX_BYTES + 1)
    return folder_end > 0 and len(encoded) - folder_end - 1 <= _NAME_BYTES


def _pack(
    number: int, files: StagedFiles, positions: "array[int]", offsets_bytes: "array[int]", end_bytes: int
) -> Pack:
    return Pack(
        number=number,
        files=Selected(files, positions),
        offsets_bytes=offsets_bytes,
        size_bytes=end_bytes + _END_BYTES,
    )

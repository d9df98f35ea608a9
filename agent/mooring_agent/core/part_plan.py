"""File -> parts within S3's limits.

Owns the arithmetic only. A file no larger than one part is sent whole, by a single PUT: its plan has one part (none
when it is empty, which is still one PUT). Invariant: the same arguments give the same plan in every version, for
journals tell of parts by their numbers alone.
"""

from typing import Final

from mooring_agent.core.model import Part

MIN_PART_BYTES: Final = 5 * 1024 * 1024
MAX_PARTS: Final = 10_000
_GRANULE_BYTES: Final = 1024 * 1024


def part_size_for(size_bytes: int, preferred_bytes: int) -> int:
    """Bytes per part: the preferred size, grown in whole MiB for a file that would need more than 10,000 of them."""
    needed = -(-size_bytes // MAX_PARTS)
    grown = -(-needed // _GRANULE_BYTES) * _GRANULE_BYTES
    return max(preferred_bytes, grown, MIN_PART_BYTES)


def plan(size_bytes: int, part_size_bytes: int) -> tuple[Part, ...]:
    """The parts of a file in order; empty for an empty file."""
    return tuple(
        Part(number=index + 1, offset_bytes=offset, size_bytes=min(part_size_bytes, size_bytes - offset))
        for index, offset in enumerate(range(0, size_bytes, part_size_bytes))
    )

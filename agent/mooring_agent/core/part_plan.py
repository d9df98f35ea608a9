"""File -> parts within S3's limits, and the size of a part that suits the wire.

Owns the arithmetic only. A file no larger than one part is sent whole, by a single PUT: its plan has one part (none
when it is empty, which is still one PUT). Invariant: the same arguments give the same plan in every version, for
journals tell of parts by their numbers alone.

The size that suits the wire is chosen when a checkpoint is staged, recorded with its pins, and fixed from then on. Two
agents, or one for ranks that it stages one after the other, may choose differently for the same file.

A slow wire gets smaller parts: what is in flight delays the checkpoint that takes the wire next, and is lost when a
request breaks or a just-in-time save pushes it off. A fast one gets the configured size and no more: from 32 to 64 MiB
a byte costs hardly less CPU, while a file needs eight parts to use eight connections. Measured is what all connections
bring together for two seconds at least; many small files bring little in that time, and what follows them alone may get
smaller parts than the wire could bear, which costs some CPU until its own parts are measured.
"""

from typing import Final

from mooring_agent.core.limits import PARTS_PER_FILE
from mooring_agent.core.model import Part

MIN_PART_BYTES: Final = 5 * 1024 * 1024
_GRANULE_BYTES: Final = 1024 * 1024
# Below it the requests themselves begin to count.
_LEAST_PREFERRED_BYTES: Final = 8 * 1024 * 1024
_LONGEST_WINDOW_SECONDS: Final = 5.0


def preferred_part_size(configured_bytes: int, bytes_per_second: float, window: int) -> int:
    """The configured size, halved until a window of parts lands within five seconds, but never below 8 MiB.

    `bytes_per_second` is the goodput of the whole window; 0: nothing was measured.
    """
    size_bytes = configured_bytes
    while (
        size_bytes // 2 >= _LEAST_PREFERRED_BYTES
        and 0 < bytes_per_second * _LONGEST_WINDOW_SECONDS < size_bytes * window
    ):
        size_bytes //= 2
    return size_bytes


def part_size_for(size_bytes: int, preferred_bytes: int) -> int:
    """Bytes per part: the preferred size, grown in whole MiB for a file that would need more than 10,000 of them."""
    needed = -(-size_bytes // PARTS_PER_FILE)
    grown = -(-needed // _GRANULE_BYTES) * _GRANULE_BYTES
    return max(preferred_bytes, grown, MIN_PART_BYTES)


def plan(size_bytes: int, part_size_bytes: int) -> tuple[Part, ...]:
    """The parts of a file in order; empty for an empty file."""
    return tuple(
        Part(number=index + 1, offset_bytes=offset, size_bytes=min(part_size_bytes, size_bytes - offset))
        for index, offset in enumerate(range(0, size_bytes, part_size_bytes))
    )

"""How much memory a save's rank manifests take in the process that reads them, and what is said where it is not there.

Whoever restores or commits has them all in memory, and the kernel ends a process that takes more than its limit, each
time anew. So what they take is reckoned from their sizes before one of them is fetched. The factors are measured with
forged manifests of the worst form (tests/integration/test_manifest_memory.py): the estimate is never below the truth.
"""

from collections.abc import Sequence
from typing import Final

from mooring_agent.core.errors import ErrorKind, StoreError

_PROCESS_BYTES: Final = 96 * 1024**2
"""All else that is in memory at the same time: the program, parts and packs on their way."""
_FILE_BYTES: Final = 500
"""For each file, listed and decoded, besides its bytes in the manifest."""
_KEPT_FACTOR: Final = 6
"""For each byte of a manifest: a path is kept twice, and one character of it can make four bytes of each."""
_DECODING_FACTOR: Final = 8
"""For each byte of the manifest that is being decoded: one at a time."""
_PACK_FACTOR: Final = 2
"""For each byte of the largest pack, which is there twice while it arrives."""
_MIB: Final = 1024**2

HINT: Final = "raise its memory limit (`mooring.dev/memory`), or save fewer and larger files"


def needed_bytes(*, files: int, manifests_bytes: Sequence[int] = (), largest_pack_bytes: int = 0) -> int:
    """The memory that a process needs to read rank manifests of these sizes, which speak of so many files."""
    return (
        _PROCESS_BYTES
        + _FILE_BYTES * files
        + _KEPT_FACTOR * sum(manifests_bytes)
        + _DECODING_FACTOR * max(manifests_bytes, default=0)
        + _PACK_FACTOR * largest_pack_bytes
    )


def largest_manifest_bytes(limit_bytes: int | None, most_bytes: int) -> int:
    """The largest rank manifest that can be read alone, and no more than `most_bytes`."""
    if limit_bytes is None:
        return most_bytes
    return max(0, min(most_bytes, (limit_bytes - _PROCESS_BYTES) // (_KEPT_FACTOR + _DECODING_FACTOR)))


def shortage(name: str, needed_bytes: int, limit_bytes: int) -> StoreError:
    """What is said of a checkpoint whose manifests do not fit. It is not damaged: more memory mends it."""
    return StoreError(
        ErrorKind.MEMORY_SHORT,
        f"{name} needs {-(-needed_bytes // _MIB):,} MiB of memory for its rank manifests, "
        f"this process may have {limit_bytes // _MIB:,} MiB: {HINT}",
        hint=HINT,
    )

"""Tells the C library's allocator that this process is a guest beside a trainer.

Owns what is said to glibc; another C library has no such calls and is left as it is. glibc would give our threads
heaps of their own and keep what they free: a third more memory after an upload, and no faster (benchmarks/memory.py).
"""

import ctypes
from typing import Final

_M_ARENA_MAX: Final = -8
_ARENAS: Final = 1

_libc = ctypes.CDLL(None)


def share_one_heap() -> None:
    """One heap for all threads; call it before there are any."""
    if hasattr(_libc, "mallopt"):
        _libc.mallopt(_M_ARENA_MAX, _ARENAS)


def give_back() -> None:
    """Return free memory to the system; takes some milliseconds."""
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)

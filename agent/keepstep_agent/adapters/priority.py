"""Makes this process yield to the trainer: lowers its CPU and I/O priority and returns free memory to the kernel."""

import ctypes
import os
from typing import Final

import structlog

_M_ARENA_MAX: Final = -8
_M_MMAP_THRESHOLD: Final = -3
_ARENAS: Final = 1
_LARGE_BYTES: Final = 1024 * 1024
"""Pieces of memory that go back to the kernel as soon as they are freed. glibc alone would raise it each time."""

_libc = ctypes.CDLL(None)


def keep_heap_small() -> None:
    """Use one heap for all threads, and keep large pieces of memory out of it. Call it before there are any threads."""
    if hasattr(_libc, "mallopt"):
        _libc.mallopt(_M_ARENA_MAX, _ARENAS)
        _libc.mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)


def malloc_trim() -> None:
    """Return free memory to the system. Takes some milliseconds."""
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)


log = structlog.get_logger("keepstep.agent")


def set_priority(*, nice: int, io_priority: str) -> None:
    """Set CPU niceness and I/O priority. Call it before there are threads. Logs a warning if the system forbids it."""
    try:
        if nice:
            os.nice(nice)
        if io_priority != "inherit":
            _set_io_priority(io_priority)
    except OSError as error:
        log.warning(
            "priority.refused",
            nice=nice,
            io_priority=io_priority,
            error=str(error),
            hint="the priority stays as it is; a container's seccomp profile may forbid setpriority and ioprio_set",
        )


def _set_io_priority(io_priority: str) -> None:
    # Imported here because it is seldom needed.
    import psutil

    process = psutil.Process()
    try:
        if io_priority == "idle":
            process.ionice(psutil.IOPRIO_CLASS_IDLE)
        else:
            process.ionice(psutil.IOPRIO_CLASS_BE, int(io_priority))
    except psutil.Error as error:
        raise PermissionError(str(error)) from error

"""How this process yields to the trainer: CPU and I/O priority, and freed memory returned to the kernel."""

import ctypes
import os
from typing import Final

import structlog

_M_ARENA_MAX: Final = -8
_ARENAS: Final = 1

_libc = ctypes.CDLL(None)


def share_one_heap() -> None:
    """One heap for all threads; call it before there are any."""
    if hasattr(_libc, "mallopt"):
        _libc.mallopt(_M_ARENA_MAX, _ARENAS)


def malloc_trim() -> None:
    """Return free memory to the system; takes some milliseconds."""
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)


log = structlog.get_logger("mooring.agent")


def set_priority(*, nice: int, io_priority: str) -> None:
    """Call it before there are threads. A system that forbids it is no reason not to run."""
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
            hint="the agent runs on as it is; a container's seccomp profile may forbid setpriority and ioprio_set",
        )


def _set_io_priority(io_priority: str) -> None:
    # Imported here: hardly anybody asks for it.
    import psutil

    process = psutil.Process()
    try:
        if io_priority == "idle":
            process.ionice(psutil.IOPRIO_CLASS_IDLE)
        else:
            process.ionice(psutil.IOPRIO_CLASS_BE, int(io_priority))
    except psutil.Error as error:
        raise PermissionError(str(error)) from error

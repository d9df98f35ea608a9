"""Lets others go first, at the CPU and at the disk, where a setting says so.

Linux keeps both for each thread, and a thread begins with those of the one that made it. Nobody but root can go back to
the front, so this is said once and holds in the drain too: that is why nothing is given away unless somebody asks.
"""

import os

import structlog

log = structlog.get_logger("mooring.agent")


def give_way(*, nice: int, io_priority: str) -> None:
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

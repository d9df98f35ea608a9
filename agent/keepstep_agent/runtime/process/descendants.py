"""The processes below this one, which the kernel keeps below it when their parents die."""

import asyncio
import contextlib
import ctypes
import os
from typing import Final

import structlog

from keepstep_agent.adapters.output.program import children, lives, living_below

_LOOK_SECONDS: Final = 0.1
_REAPING_SECONDS: Final = 30.0
# From linux/prctl.h.
_SET_CHILD_SUBREAPER: Final = 36

log = structlog.get_logger("keepstep.run")


def adopt_orphans() -> None:
    """Have every process below this one whose parent dies become a child of this one, where the kernel can."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, *map(ctypes.c_ulong, (1, 0, 0, 0)))


async def reap_orphans() -> None:
    """Have the children leave the process table that have ended and that nobody waits for, until cancelled."""
    ended: set[int] = set()
    while True:
        # Whoever waits for a child of its own has done so by the second look.
        for pid in ended:
            _reaped(pid)
        ended = {pid for pid in children(os.getpid()) if not lives(pid)}
        await asyncio.sleep(_REAPING_SECONDS)


class Descendants:
    """The processes that live below this one now, except for `besides` and what is below that. Blocks."""

    def __init__(self, *, besides: int | None) -> None:
        self._besides = besides
        self._there = frozenset(living_below(os.getpid(), besides=self._besides))

    async def ended(self, seconds: float) -> list[int] | None:
        """Wait until they all have ended; return the exit codes of those that outlived their parents meanwhile.

        A signal's is negative. None if some still live after `seconds`.
        """
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + seconds
        left = self._there & set(living_below(os.getpid(), besides=self._besides))
        outlived, said = left, False
        while True:
            if not left:
                return [code for pid in outlived if (code := _reaped(pid)) is not None]
            if loop.time() >= give_up_at:
                log.warning("run.processes_given_up", pids=sorted(left))
                return None
            if not said:
                said = True
                log.warning("run.waits_for_processes", pids=sorted(left), at_most_seconds=round(seconds, 1))
            await asyncio.sleep(_LOOK_SECONDS)
            left = left & set(living_below(os.getpid(), besides=self._besides))


def _reaped(pid: int) -> int | None:
    """Return the exit code of a child that has ended; None if it is none, or somebody else has waited for it."""
    try:
        found, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return None
    return os.waitstatus_to_exitcode(status) if found else None

"""Whether the program that writes to the output directories lives, as /proc shows it beside its runner."""

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

_MOST_PROCESSES: Final = 1_024


def other_children(parent_pid: int | None) -> frozenset[int] | None:
    """Return a process's living children besides this one; None if it is None, or the kernel does not say."""
    if parent_pid is None:
        return None
    try:
        children = Path(f"/proc/{parent_pid}/task/{parent_pid}/children").read_text().split()
        return frozenset(int(child) for child in children if int(child) != os.getpid() and lives(int(child)))
    except OSError:
        return None


def family(pids: Iterable[int]) -> frozenset[int]:
    """Return these processes and those below them that live, as far as their main threads have started them."""
    found: set[int] = set()
    waiting = list(pids)
    while waiting and len(found) < _MOST_PROCESSES:
        pid = waiting.pop()
        if pid in found or not lives(pid):
            continue
        found.add(pid)
        with suppress(OSError):
            waiting += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    return frozenset(found)


def lives(pid: int) -> bool:
    """Whether there is such a process, which has not ended."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return False
    # After the name, which may hold anything: Z and X are those that have ended.
    return status.rpartition(")")[2].split()[0] not in "ZX"

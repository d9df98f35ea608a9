"""Which processes live below another one, as /proc shows them: of the program that writes to the output directories."""

import os
from collections import deque
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Final

_PROCESSES: Final = Path("/proc")
_MOST_PROCESSES: Final = 4096
_MOST_THREADS: Final = 64


def other_children(parent_pid: int | None) -> frozenset[int] | None:
    """Return a process's living children besides this one; None if it is None, or the kernel does not say."""
    if parent_pid is None:
        return None
    try:
        children = Path(f"/proc/{parent_pid}/task/{parent_pid}/children").read_text().split()
        return frozenset(int(child) for child in children if int(child) != os.getpid() and lives(int(child)))
    except OSError:
        return None


def children(pid: int) -> Iterator[int]:
    """Yield the children that the process's threads have started."""
    try:
        for task in islice((_PROCESSES / str(pid) / "task").iterdir(), _MOST_THREADS):
            yield from map(int, (task / "children").read_text().split())
    except OSError:
        return


def living_below(pid: int, *, besides: int | None) -> Iterator[int]:
    """Yield the processes that live below this one, except for `besides` and what is below that."""
    waiting = deque(children(pid))
    for _ in range(_MOST_PROCESSES):
        if not waiting:
            return
        below = waiting.popleft()
        if below != besides:
            waiting.extend(children(below))
            if lives(below):
                yield below


def lives(pid: int) -> bool:
    """Whether there is such a process, which has not ended."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return False
    # After the name, which may hold anything: Z and X are those that have ended.
    return status.rpartition(")")[2].split()[0] not in "ZX"

"""Whether the program that writes to the output directories lives, as /proc shows it beside its runner."""

import os
from pathlib import Path


def other_children(parent_pid: int | None) -> frozenset[int] | None:
    """Return a process's living children besides this one; None if it is None, or the kernel does not say."""
    if parent_pid is None:
        return None
    try:
        children = Path(f"/proc/{parent_pid}/task/{parent_pid}/children").read_text().split()
        return frozenset(int(child) for child in children if int(child) != os.getpid() and lives(int(child)))
    except OSError:
        return None


def lives(pid: int) -> bool:
    """Whether there is such a process, which has not ended."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return False
    # After the name, which may hold anything: Z and X are those that have ended.
    return status.rpartition(")")[2].split()[0] not in "ZX"

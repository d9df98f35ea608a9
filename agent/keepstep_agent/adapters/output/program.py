"""Whether the program that writes to the output directories lives, as /proc shows it beside its runner."""

import os
from pathlib import Path


def has_other_children(parent_pid: int | None) -> bool:
    """Whether a process has a living child besides this one. True if it is None, or the kernel does not say."""
    if parent_pid is None:
        return True
    try:
        children = Path(f"/proc/{parent_pid}/task/{parent_pid}/children").read_text().split()
        return any(lives(int(child)) for child in children if int(child) != os.getpid())
    except OSError:
        return True


def lives(pid: int) -> bool:
    """Whether there is such a process, which has not ended."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return False
    # After the name, which may hold anything: Z and X are those that have ended.
    return status.rpartition(")")[2].split()[0] not in "ZX"

"""The POSIX lock that tells the agent this process lives; the kernel drops it the moment the process dies.

Owns the lock files' descriptors. Invariant: a descriptor, once open, is never closed and its file never opened again
in this process, because closing any descriptor of a file drops all POSIX locks the process has on it. Forked workers
inherit the descriptor but not the lock, and their exit leaves it alone.
"""

import fcntl
import os
from pathlib import Path
from typing import Final

_descriptors: Final[dict[Path, int]] = {}


def hold_liveness_lock(path: Path) -> bool:
    """Hold the lock for the life of this process; False if another live process has it. Raises OSError."""
    path = path.resolve()
    if path not in _descriptors:
        path.parent.mkdir(parents=True, exist_ok=True)
        _descriptors[path] = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o660)
    try:
        fcntl.lockf(_descriptors[path], fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True

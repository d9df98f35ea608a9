"""What the operating system offers of what Keepstep needs. There are agents on Linux alone.

Elsewhere a script that is developed there saves and resumes on the local disk, as without an agent, and nothing is
protected: no agent is called, no lock is held, and SIGTERM keeps the program's handler.
"""

import ctypes
import logging
import os
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Final

_log: Final = logging.getLogger("keepstep")

HAS_AGENTS: Final = sys.platform == "linux"
"""Whether an agent can run here, so that there is somebody to protect the trainer."""
DIRECTORY_FLAG: Final[int | None] = getattr(os, "O_DIRECTORY", None)
"""Flag to open a directory in order to sync it; None where that cannot be done, as on Windows."""
SYNC_MODE: Final = os.O_RDWR if sys.platform == "win32" else os.O_RDONLY
"""How to open a file in order to sync it: Windows syncs only what is open for writing."""

_AT_FDCWD: Final = -100
_RENAME_EXCHANGE: Final = 2
"""From <linux/fs.h> and <fcntl.h>."""


def exchange(one: Path, other: Path) -> bool:
    """Exchange the names of two files or folders in one step. Returns False where the file system cannot."""
    renameat2 = _renameat2()
    return renameat2 is not None and not renameat2(
        _AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE
    )


@lru_cache(maxsize=1)
def _renameat2() -> Callable[..., int] | None:
    try:
        function: Callable[..., int] | None = getattr(ctypes.CDLL(None), "renameat2", None)
    except (OSError, TypeError):
        return None
    return function


@lru_cache(maxsize=1)
def warn_unprotected() -> None:
    """Log once in this process that Keepstep protects nothing here."""
    _log.warning(
        "Keepstep protects nothing on this operating system, checkpoints stay on the local disk: system=%s hint=run "
        "the training on Linux, with `keepstep run` or in a pod",
        sys.platform,
    )

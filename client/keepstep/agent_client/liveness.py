"""The POSIX lock that shows the agent that this process is alive; the kernel drops it when the process dies.

The locked file lists the checkpoints that this process is about to announce, as a JSON list of paths relative to the
volume. The agent's directory watch ignores them. A claim ends with its process, and needs no agent to be running.

Owns the lock files' descriptors. Invariant: a descriptor, once open, is never closed and its file never opened again
in this process, because closing any descriptor of a file drops all POSIX locks the process has on it. Forked workers
inherit the descriptor but not the lock, and their exit does not drop it. Where no agent can run, nothing is locked.
"""

import json
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from keepstep.operating_system import HAS_AGENTS

_log: Final = logging.getLogger("keepstep")
_descriptors: Final[dict[Path, int]] = {}
_claims: Final[dict[Path, list[str]]] = {}
_saying: Final = threading.Lock()


def hold_liveness_lock(path: Path) -> bool:
    """Hold the lock for the life of this process; False if another live process has it. Raises OSError."""
    path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    if not HAS_AGENTS:
        return True
    import fcntl  # Windows has none

    if path not in _descriptors:
        _descriptors[path] = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o660)
    try:
        fcntl.lockf(_descriptors[path], fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    with _saying:
        # The claims of the process that held the lock before are void.
        _say(path)
    return True


@contextmanager
def claimed(path: Path, checkpoint: str) -> Iterator[None]:
    """While open, list `checkpoint` in the lock file `path` as about to be announced. Another thread may close it."""
    if not HAS_AGENTS:
        yield
        return
    path = path.resolve()
    with _saying:
        _claims.setdefault(path, []).append(checkpoint)
        _say(path)
    try:
        yield
    finally:
        with _saying:
            _claims[path].remove(checkpoint)
            _say(path)


def _say(path: Path) -> None:
    claims = _claims.get(path)
    content = json.dumps(claims).encode() if claims else b""
    try:
        # Write, then truncate: until then the rest of a longer list makes the JSON invalid, so that no reader takes a
        # part of the list for the whole.
        os.pwrite(_descriptors[path], content, 0)
        os.ftruncate(_descriptors[path], len(content))
    except OSError as error:
        _log.debug("claims not written: path=%s error=%s", path, error)

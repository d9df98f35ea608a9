"""Makes whoever in this process touches a checkpoint that is still being written wait until it is complete.

A program that was written for saves that end before they return may read what it has saved, rename it or add to it.
Python reports these calls to audit hooks, and there they wait, as if the save had not returned before. A question such
as `os.path.exists` is not reported, nor is what a library opens by itself, without Python.
"""

import os
import sys
import threading
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final

_PATHS: Final = {
    **dict.fromkeys(
        ("open", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "os.utime", "os.chmod", "os.chown"), 1
    ),
    **dict.fromkeys(("os.rename", "os.link", "os.symlink", "shutil.move", "shutil.copytree"), 2),
    "shutil.rmtree": 1,
}
"""Event -> how many of its first arguments are paths."""
_LISTINGS: Final = frozenset(("os.listdir", "os.scandir"))
_PROGRAMS: Final = frozenset(("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn"))

_waits: Final[dict[str, Callable[[], object]]] = {}
"""Absolute path -> what waits until it is complete. Raises nothing."""
_this_thread = threading.local()
"""Its `writes` is set in threads that are never held up."""


def hold(path: str, wait: Callable[[], object]) -> None:
    """Have everyone call `wait` who touches `path` or what is below it, or lists the directory that it is in."""
    _install()
    _waits[path] = wait


def release(path: str) -> None:
    """Hold up nobody any more. Idempotent."""
    _waits.pop(path, None)


def wait_for(path: str | os.PathLike[str]) -> None:
    """Wait as one who touches `path`: for a library that only asks whether it exists."""
    _hook("open", (path,))


def let_pass() -> None:
    """Never hold up the calling thread, which writes."""
    _this_thread.writes = True


@lru_cache(maxsize=1)
def _install() -> None:
    # For the life of the process: nothing removes a hook.
    sys.addaudithook(_hook)
    if hasattr(os, "register_at_fork"):
        # A forked child has no thread that it could wait for.
        os.register_at_fork(after_in_child=_waits.clear)


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if not _waits or hasattr(_this_thread, "writes"):
        return
    if event in _PATHS:
        touched = [_absolute(path) for path in arguments[: _PATHS[event]]]
        if event == "os.symlink":
            # What it leads to is relative to its own directory.
            touched.append(_absolute(os.path.join(os.path.dirname(touched[1]), os.fsdecode(arguments[0]))))  # noqa: PTH118, PTH120
        _wait(lambda held: any(path == held or path.startswith(held + os.sep) for path in touched))
    elif event in _LISTINGS:
        listed = _absolute(arguments[0])
        _wait(lambda held: listed in (held, os.path.dirname(held)) or listed.startswith(held + os.sep))  # noqa: PTH120
    elif event in _PROGRAMS:
        words = str(arguments)
        _wait(lambda held: os.path.dirname(held) in words or os.path.basename(held) in words)  # noqa: PTH119, PTH120


def _wait(concerns: Callable[[str], bool]) -> None:
    for held, wait in list(_waits.items()):
        if concerns(held):
            wait()


def _absolute(path: Any) -> str:
    """Return the path as text; empty for what is none, such as a descriptor."""
    try:
        return os.path.abspath(os.fsdecode(path))  # noqa: PTH100 - Path's is slower, and is asked for each open file
    except (TypeError, ValueError, OSError):
        return ""

"""Waits until a program is done with the folder of a checkpoint that it has just saved."""

import os
import threading
import time
from pathlib import Path
from typing import Final

QUIET_SECONDS: Final = 2.0
_MOST_SECONDS: Final = 60.0
_LOOK_SECONDS: Final = 0.5


def wait_until_quiet(folder: Path, wait_no_more: threading.Event) -> None:
    """Return when for 2 s no file was added or is being written, after a minute, or once `wait_no_more` is set.

    What lies there by now may change: a log that grows with every step would hold up the checkpoint.
    """
    there = {path for path, *_ in _files(folder)}
    added: set[tuple[str, int, int]] = set()
    began = since = time.monotonic()
    while not wait_no_more.wait(_LOOK_SECONDS):
        now = {file for file in _files(folder) if file[0] not in there}
        if now != added:
            added, since = now, time.monotonic()
        elif time.monotonic() - since >= QUIET_SECONDS:
            return
        if time.monotonic() - began >= _MOST_SECONDS:
            # Ranks of other pods wait for this one.
            return


def _files(folder: Path) -> set[tuple[str, int, int]]:
    """Return path, size in bytes and time of change of each file; none if the program has renamed the folder."""
    files = set()
    for parent, _, names in os.walk(folder):
        for path in (os.path.join(parent, name) for name in names):  # noqa: PTH118
            try:
                status = os.stat(path, follow_symlinks=False)  # noqa: PTH116
            except OSError:
                continue
            files.add((path, status.st_size, status.st_mtime_ns))
    return files

"""What still happens to a checkpoint after its save has returned, until it is announced.

A framework may write in the background: one thread follows each write, in the order of the writes. A program may add
files to its folder.
"""

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from keepstep.asynchronous_saves.background_writer import BackgroundSave
from keepstep.publishing import Publication
from keepstep.ranks.coordinator import PATIENCE_SECONDS

_QUIET_SECONDS: Final = 2.0
_MOST_SECONDS: Final = 60.0
_LOOK_SECONDS: Final = 0.5


@dataclass(slots=True, kw_only=True)
class UnannouncedSave:
    """A checkpoint that is saved, and not announced.

    `publication` is None if it cannot be announced. `outside`: it was written there, outside the volume, and is linked
    to `path` when it is announced. `behind`: its files are being written behind the training. `in_place`: it is there,
    on all ranks. `may_change`: the program may still add to it, or rename it.
    """

    path: Path
    outside: Path | None = None
    publication: Publication | None
    claim: ExitStack
    behind: BackgroundSave | None = None
    in_place: bool = False
    may_change: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Write:
    future: "Future[Any]"
    thread: threading.Thread


class BackgroundWrites:
    """The writes of one process that are not yet followed to their end."""

    def __init__(self) -> None:
        self._writes: list[_Write] = []

    def follow(self, future: "Future[Any]", work: Callable[[BaseException | None], object]) -> None:
        """Call `work` in a thread once `future` is done, with what it failed with, or None.

        Work for an earlier write that is done by then comes first: the agent takes the last announcement for the
        newest checkpoint. A write that hangs holds up no later one.
        """
        earlier = self._writes = [one for one in self._writes if one.thread.is_alive()]

        def run() -> None:
            failure: BaseException | None
            try:
                failure = future.exception()
            except CancelledError as cancelled:
                failure = cancelled
            for one in earlier:
                if one.future.done():
                    one.thread.join(PATIENCE_SECONDS)
            work(failure)

        thread = threading.Thread(target=run, name="keepstep-announce", daemon=True)
        self._writes = [*earlier, _Write(future=future, thread=thread)]
        thread.start()

    def wait(self) -> None:
        """Wait for all writes and their work, each for a bounded time."""
        for one in self._writes:
            one.thread.join(PATIENCE_SECONDS)


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
        elif time.monotonic() - since >= _QUIET_SECONDS:
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

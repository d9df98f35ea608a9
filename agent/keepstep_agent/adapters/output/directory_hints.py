"""Reports early that a directory may have changed, so that a poll need not wait.

Events are hints only, because many changes cause none: the kernel's queue can overflow, and mapped writes and replaced
directories are silent. Polling finds every change.
"""

import errno
import os
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

import structlog
from watchdog.events import (
    DirCreatedEvent,
    DirDeletedEvent,
    DirMovedEvent,
    FileClosedEvent,
    FileCreatedEvent,
    FileModifiedEvent,
    FileMovedEvent,
    FileSystemEvent,
    FileSystemEventHandler,
)
from watchdog.observers import Observer
from watchdog.observers.api import BaseObserver
from watchdog.observers.inotify import InotifyWatchGroup
from watchdog.observers.inotify_c import WatchDescriptor

from keepstep_agent.adapters.volume.shared_volume import open_volume

# Without the events that the agent's own reading causes: opened, and closed without a write.
_CHANGES: Final[list[type[FileSystemEvent]]] = [
    DirCreatedEvent,
    DirDeletedEvent,
    DirMovedEvent,
    FileClosedEvent,
    FileCreatedEvent,
    FileModifiedEvent,
    FileMovedEvent,
]
# Of a folder in a new folder watchdog hears twice. The kernel keeps one watch of it all the same.
warnings.filterwarnings("ignore", "Callback with id .* already exists", RuntimeWarning)
_on_watch_deleted: Final = InotifyWatchGroup.on_watch_deleted


def _forget_watch(self: InotifyWatchGroup, wd: WatchDescriptor) -> None:
    """Do as watchdog does, but outlive a folder that took the place of another one, once both are deleted.

    watchdog 7.1.0 raises KeyError then, which ends the thread that reads all events.
    """
    with suppress(KeyError):
        _on_watch_deleted(self, wd)


InotifyWatchGroup.on_watch_deleted = _forget_watch  # type: ignore[method-assign]
_STOP_TIMEOUT_SECONDS: Final = 5.0
_RETRY_SECONDS: Final = 30.0

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


class DirectoryHints(FileSystemEventHandler):
    """Calls `notify`, from a thread of its own, when something below the directory changes, except `ignored` paths."""

    def __init__(self, directory: Path, notify: Callable[[], None], *, ignored: Callable[[str], bool]) -> None:
        self._directory = directory
        self._notify = notify
        self._ignored = ignored
        self._observer: BaseObserver | None = None
        self._followed: tuple[int, int] | None = None
        self._closed = False
        self._told = ""
        self._retry_at = 0.0
        self._lock = threading.Lock()

    def follow(self) -> None:
        """Watch the directory that has this name at present. Cheap if it is the same one as before."""
        try:
            status = self._directory.stat()
        except OSError:
            return
        identity = (status.st_dev, status.st_ino)
        with self._lock:
            if not self._closed and identity != self._followed and time.monotonic() >= self._retry_at:
                self._detach()
                self._attach(identity)

    def close(self) -> None:
        """Stop for good. A concurrent or later `follow` does nothing."""
        with self._lock:
            self._closed = True
            self._detach()

    def on_any_event(self, event: FileSystemEvent) -> None:
        if event.is_directory or not self._ignored(os.fsdecode(event.src_path)):
            self._notify()

    def _attach(self, identity: tuple[int, int]) -> None:
        observer = Observer()
        try:
            _check_size(self._directory)
            observer.schedule(self, str(self._directory), recursive=True, event_filter=_CHANGES)
            observer.start()
        except OSError as error:
            # The kernel's limit on watches may have room again later. Until then polling works without events.
            self._retry_at = time.monotonic() + _RETRY_SECONDS
            if str(error) != self._told:
                self._told = str(error)
                _log.warning("watch.events_unavailable", directory=str(self._directory), reason=str(error))
            return
        if self._told:
            self._told = ""
            _log.info("watch.events_available", directory=str(self._directory))
        self._observer, self._followed = observer, identity

    def _detach(self) -> None:
        observer, self._observer, self._followed = self._observer, None, None
        if observer is not None:
            observer.stop()
            observer.join(_STOP_TIMEOUT_SECONDS)


def _check_size(directory: Path) -> None:
    """Raise OSError if the directory is too large to be walked: watchdog lists all of it, without a limit."""

    def unreadable(_: str, error: OSError) -> None:
        if error.errno == errno.EOVERFLOW:
            raise error

    with open_volume(directory) as root:
        for _ in root.walk(unreadable):
            pass

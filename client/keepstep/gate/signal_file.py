"""Reads the signal file in the trainer: maps it, and checks once a second whether it was replaced."""

import mmap
import time
from pathlib import Path
from typing import Final

from keepstep_api import signal_file

_LOOK_SECONDS: Final = 1.0
_NUMBER: Final = slice(signal_file.NUMBER_OFFSET, signal_file.NUMBER_OFFSET + 8)
_NO_REQUEST: Final = bytes(8)


class SignalFile:
    """Reads save requests from the signal file, in one thread. The agent may create or replace the file at any time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._map: mmap.mmap | None = None
        self._inode: tuple[int, int] | None = None
        self._look_at = 0.0
        self._seen = _NO_REQUEST
        self._open()

    def terminating_at_start(self) -> bool:
        """Return whether an earlier request still says that the pod is ending.

        Ignores other earlier requests, because they were for other processes.
        """
        if self._map is None:
            return False
        signal = signal_file.decode(self._map[:])
        self._seen = self._map[_NUMBER]
        return signal.terminating and signal.deadline_unix > time.time()

    def look(self) -> None:
        """Make the next `new_request` check whether the file was replaced, even within the same second."""
        self._look_at = 0.0

    def new_request(self) -> signal_file.SaveSignal | None:
        if time.monotonic() >= self._look_at:
            self._open()
        if self._map is None or self._map[_NUMBER] == self._seen:
            return None
        self._seen = self._map[_NUMBER]
        signal = signal_file.decode(self._map[:])
        return signal if signal.number else None

    def close(self) -> None:
        if self._map is not None:
            self._map.close()
            self._map = None
        self._look_at = float("inf")

    def _open(self) -> None:
        self._look_at = time.monotonic() + _LOOK_SECONDS
        try:
            found = self._path.stat()
            # A shorter file is not complete yet, and reading its mapping would kill the process.
            if (found.st_dev, found.st_ino) == self._inode or found.st_size < signal_file.SIZE_BYTES:
                return
            with self._path.open("rb") as file:
                mapped = mmap.mmap(file.fileno(), signal_file.SIZE_BYTES, access=mmap.ACCESS_READ)
        except (OSError, ValueError):
            return
        if self._map is not None:
            self._map.close()
        self._map, self._inode = mapped, (found.st_dev, found.st_ino)

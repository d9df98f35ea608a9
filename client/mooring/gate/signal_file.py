"""The trainer's end of the signal file: mapped, with one system call a second to see whether it was replaced."""

import mmap
import time
from pathlib import Path
from typing import Final

from mooring_api import signal_file

_LOOK_SECONDS: Final = 1.0
_NUMBER: Final = slice(signal_file.NUMBER_OFFSET, signal_file.NUMBER_OFFSET + 8)
_NO_REQUEST: Final = bytes(8)


class SignalFile:
    """The agent makes the file, perhaps after us, and perhaps anew. For one thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._map: mmap.mmap | None = None
        self._inode: tuple[int, int] | None = None
        self._look_at = 0.0
        self._seen = _NO_REQUEST
        self._open()

    def terminating_at_start(self) -> bool:
        """Whether an earlier request still says that the pod is ending. Others were for other processes."""
        if self._map is None:
            return False
        signal = signal_file.decode(self._map[:])
        self._seen = self._map[_NUMBER]
        return signal.terminating and signal.deadline_unix > time.time()

    def look(self) -> None:
        """See at the next question whether there is another file, however long ago that was looked at."""
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
            # A shorter file is still being made, and reading its mapping would be fatal.
            if (found.st_dev, found.st_ino) == self._inode or found.st_size < signal_file.SIZE_BYTES:
                return
            with self._path.open("rb") as file:
                mapped = mmap.mmap(file.fileno(), signal_file.SIZE_BYTES, access=mmap.ACCESS_READ)
        except (OSError, ValueError):
            return
        if self._map is not None:
            self._map.close()
        self._map, self._inode = mapped, (found.st_dev, found.st_ino)

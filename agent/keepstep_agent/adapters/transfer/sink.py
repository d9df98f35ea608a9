"""Writes an object's bytes to a file that already has its full size.

A descriptor that was opened with O_DIRECT is written past the page cache: a checkpoint's worth of pages would push out
what the node needs, and copying into them costs as much as receiving. Bytes that do not fill a block (the end of a
file) go through the cache, and so does everything that the filesystem refuses to write directly.
"""

import errno
import fcntl
import os
import threading
from typing import Final

from keepstep_agent.adapters.durable_files import write_all
from keepstep_agent.adapters.volume.errors import volume_error

BLOCK_BYTES: Final = 4096
"""The largest logical block size. Addresses, offsets and lengths of O_DIRECT writes are multiples of it."""


class PositionedFileWriter:
    """Writes an object's bytes to a file, in order, from worker threads.

    It owns a duplicate of the descriptor, because a cancelled caller may close its own while a thread still writes.
    """

    def __init__(self, descriptor: int, offset_bytes: int) -> None:
        """Raises VolumeError if this process may open no more files."""
        self._lock = threading.Lock()
        try:
            self._descriptor = os.dup(descriptor)
        except OSError as error:
            raise volume_error(error, "write the file being restored") from error
        self._direct = bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)
        self._cached = -1 if self._direct else self._descriptor
        self._offset = offset_bytes

    def write(self, data: memoryview) -> None:
        """Write `data`, which begins on a page. Blocks; does nothing after `close`. VolumeError if the disk refuses."""
        with self._lock:
            if self._descriptor < 0:
                return
            try:
                if self._direct:
                    data = self._write_blocks(data)
                if data:
                    self._write_cached(data)
            except OSError as error:
                raise volume_error(error, "write the file being restored") from error

    def close(self) -> None:
        """Close the file, after a write in progress. Idempotent."""
        with self._lock:
            for descriptor in {self._descriptor, self._cached} - {-1}:
                os.close(descriptor)
            self._descriptor = self._cached = -1

    def _write_blocks(self, data: memoryview) -> memoryview:
        """Write the whole blocks of `data` directly; return the rest, which goes through the cache."""
        if self._offset % BLOCK_BYTES:
            return data
        end = len(data) // BLOCK_BYTES * BLOCK_BYTES
        try:
            write_all(self._descriptor, data[:end], self._offset)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._direct = False
            return data
        self._offset += end
        return data[end:]

    def _write_cached(self, data: memoryview) -> None:
        if self._cached < 0:
            # Open the file again, without O_DIRECT: a duplicate of the descriptor would share that flag.
            self._cached = os.open(f"/proc/self/fd/{self._descriptor}", os.O_WRONLY | os.O_CLOEXEC)
        write_all(self._cached, data, self._offset)
        self._offset += len(data)

"""Reads the bytes of a pinned file, and notices when it is not the file that was staged.

Owns a descriptor that worker threads open and read from while the event loop may cancel them. A lock keeps `close` from
freeing a descriptor that a thread is still using, and nothing opens the file after `close`. Knows nothing of stores.
All methods block, unless they say otherwise, and raise VolumeError only; `send` also raises OSError.
"""

import os
import threading
from pathlib import Path
from typing import Self

from keepstep_agent.adapters.volume.errors import volume_error
from keepstep_agent.adapters.volume.shared_volume import fingerprint, open_volume
from keepstep_agent.core.errors import ErrorKind, VolumeError
from keepstep_agent.core.model import Fingerprint, Part, Region


class RegionFile:
    """A region's file. Opening checks it against its fingerprint."""

    def __init__(self, region: Region) -> None:
        """Does not open the file: a caller that is cancelled during `open` needs this object to close it."""
        self._region = region
        self._lock = threading.Lock()
        self._descriptor = -1
        self._closed = False

    def __enter__(self) -> Self:
        try:
            self.open()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def open(self) -> None:
        """Raises FILE_MISSING if it is gone, FILE_CHANGED if it is another file, VOLUME_UNUSABLE if not readable."""
        with self._lock:
            if self._closed:
                raise self._closed_meanwhile()
            try:
                with open_volume(Path(self._region.volume)) as volume:
                    self._descriptor = volume.open_file(self._region.path)
            except OSError as error:
                raise volume_error(error, f"open {self._region.file}") from error
        self.check()

    def check(self) -> None:
        """Raise FILE_CHANGED unless the file still is what was staged, VOLUME_UNUSABLE if that cannot be determined."""
        with self._lock:
            try:
                status = os.fstat(self._open_descriptor())
            except OSError as error:  # the volume is gone
                raise volume_error(error, f"examine {self._region.file}") from error
        if fingerprint(status) != self._region.fingerprint:
            raise file_changed(self._region.file, "it was replaced or written to after it was staged")

    def read_cached(self, position: int, buffer: memoryview) -> int:
        """Fill `buffer` from `position` on, as far as pages are in memory, and return how many bytes. Never blocks.

        Returns 0 also if the filesystem cannot tell, if the read fails, or while another thread uses the file. Use
        `read_into` for the rest.
        """
        if not self._lock.acquire(blocking=False):
            return 0
        try:
            return os.preadv(self._open_descriptor(), [buffer], self._region.offset_bytes + position, os.RWF_NOWAIT)
        except OSError:
            return 0  # a blocking read reports any error better
        finally:
            self._lock.release()

    def read_into(self, position: int, buffer: memoryview) -> None:
        """Fill `buffer` with bytes of the region from `position` on. Raises FILE_CHANGED if there are too few."""
        with self._lock:
            try:
                count = os.preadv(self._open_descriptor(), [buffer], self._region.offset_bytes + position)
            except OSError as error:
                raise volume_error(error, f"read {self._region.file}") from error
        if count < len(buffer):
            raise self._too_short(position + count)

    def send(self, position: int, size_bytes: int, connection: int) -> int:
        """Let the kernel send bytes of the region to a non-blocking socket. Return how many; 0 if the socket is full.

        Raises FILE_CHANGED if the file is too short, and OSError if the connection broke.
        """
        with self._lock:
            try:
                count = os.sendfile(
                    connection, self._open_descriptor(), self._region.offset_bytes + position, size_bytes
                )
            except BlockingIOError:
                return 0
            except OSError as error:
                self._blame_file(position, error)
                raise
        if not count:
            raise self._too_short(position)
        return count

    def close(self) -> None:
        """Close the file, after waiting for an opening or a read in progress. Idempotent."""
        with self._lock:
            self._closed = True
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1

    def _blame_file(self, position: int, error: OSError) -> None:
        """Raise VolumeError if the file cannot be read at `position`: sendfile does not say which end failed."""
        try:
            os.pread(self._open_descriptor(), 1, self._region.offset_bytes + position)
        except OSError as reason:
            raise volume_error(reason, f"read {self._region.file}") from error

    def _open_descriptor(self) -> int:
        if self._descriptor < 0:
            raise self._closed_meanwhile()
        return self._descriptor

    def _closed_meanwhile(self) -> VolumeError:
        return VolumeError(ErrorKind.VOLUME_UNUSABLE, f"{self._region.file} was closed while it was being read")

    def _too_short(self, end: int) -> VolumeError:
        return file_changed(self._region.file, f"it ends at byte {self._region.offset_bytes + end}")


def part_region(volume: Path, path: str, part: Part, expected: Fingerprint) -> Region:
    """Return the region that is one part of the file at `path` below the volume."""
    return Region(
        volume=str(volume),
        path=path,
        offset_bytes=part.offset_bytes,
        size_bytes=part.size_bytes,
        fingerprint=expected,
    )


def file_changed(path: str, detail: str) -> VolumeError:
    return VolumeError(
        ErrorKind.FILE_CHANGED,
        f"{path} was changed after it was announced: {detail}",
        hint="write every checkpoint to new files: into a new directory, or under another name, then rename them",
    )

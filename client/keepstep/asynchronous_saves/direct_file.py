"""Writes large files past the page cache.

New pages for a whole checkpoint cost the training beside it more processor time than all else about a save, and push
out what the machine could use. What the filesystem refuses to write this way goes through the cache, as do the bytes
at the end that fill no block.
"""

import errno
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

LARGE_BYTES: Final = 8 * 1024 * 1024
"""From this size on a file is written past the page cache."""
_BUFFER_BYTES: Final = 4 * 1024 * 1024
_DIRECT: Final = getattr(os, "O_DIRECT", 0)


@contextmanager
def opened(path: str, size_bytes: int, wrote: Callable[[int], object]) -> Iterator["DirectFile | None"]:
    """Open an existing file of about this size; None where it is to be written as usual. Raises OSError.

    `wrote`: called as the file grows, with how many bytes were written. It may raise OSError.
    """
    descriptor = -1
    if _DIRECT and size_bytes >= LARGE_BYTES:
        try:
            import numpy  # noqa: F401 - torch does not need it

            descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC | _DIRECT)
        except (ImportError, OSError):
            pass
    if descriptor < 0:
        yield None
        return
    file = DirectFile(descriptor, wrote)
    try:
        yield file
        file.flush()
    except Exception as error:
        # In its place torch says that its archive is incomplete.
        raise file.failure or error from None
    finally:
        os.close(descriptor)


class DirectFile:
    """What `torch.save` needs of a file. Releases the interpreter's lock while it copies and writes."""

    def __init__(self, descriptor: int, wrote: Callable[[int], object]) -> None:
        import numpy as np

        self._descriptor = descriptor
        self._wrote = wrote
        # Anonymous memory begins on a page.
        self._buffer = memoryview(mmap.mmap(-1, _BUFFER_BYTES))
        self._pages = np.frombuffer(self._buffer, np.uint8)
        self._filled = 0
        self._direct = True
        self.failure: OSError | None = None
        """What the disk or `wrote` refused."""

    def write(self, data: Any) -> int:
        """Write any buffer of bytes. Raises OSError."""
        import numpy as np

        source = np.frombuffer(data, np.uint8)
        written = 0
        while written < len(source):
            count = min(_BUFFER_BYTES - self._filled, len(source) - written)
            self._pages[self._filled : self._filled + count] = source[written : written + count]
            self._filled += count
            written += count
            if self._filled == _BUFFER_BYTES:
                self._write_buffer()
        return written

    def flush(self) -> None:
        """Write what is still in the buffer; nothing can be written past the page cache after that."""
        if self._filled:
            self._use_cache()
            self._write_buffer()

    def _write_buffer(self) -> None:
        rest = self._buffer[: self._filled]
        while rest:
            try:
                count = os.write(self._descriptor, rest)
                self._wrote(count)
                rest = rest[count:]
            except OSError as error:
                if not (self._direct and error.errno == errno.EINVAL):
                    self.failure = error
                    raise
                self._use_cache()
        self._filled = 0

    def _use_cache(self) -> None:
        import fcntl

        if self._direct:
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, fcntl.fcntl(self._descriptor, fcntl.F_GETFL) & ~_DIRECT)
            self._direct = False

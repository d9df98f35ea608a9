"""What a worker thread sends a file through, some megabytes at a time, until the socket takes no more.

All methods block. They raise VolumeError for what is wrong with the file, OSError if the connection broke.
"""

import errno
import socket
import ssl
import threading
from typing import Final, Protocol

from mooring_agent.adapters.checksum import crc64nvme
from mooring_agent.adapters.region_file import RegionFile

_NO_SENDFILE: Final = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP})


class SocketWriter(Protocol):
    """A file's way to a store. `refused`: it does not do for this file. `checksum`: CRC64NVME of what went, or 0."""

    refused: bool
    checksum: int

    def send(self, position: int, size_bytes: int) -> int:
        """Send until that much is sent, or the socket is full; how many bytes. Goes on where the last call ended."""


class SendfileWriter:
    """The kernel copies from the file to the socket; some filesystems, and some sandboxes, have no sendfile."""

    def __init__(self, file: RegionFile, connection: socket.socket) -> None:
        """`connection` may be closed at once: this has a duplicate of its own."""
        self.refused = False
        self.checksum = 0
        self._file = file
        self._connection = connection.dup()
        self._lock = threading.Lock()

    def send(self, position: int, size_bytes: int) -> int:
        sent = 0
        with self._lock:
            while sent < size_bytes:
                try:
                    count = self._file.send(position + sent, size_bytes - sent, self._connection.fileno())
                except OSError as error:
                    self.refused = error.errno in _NO_SENDFILE
                    if not self.refused:
                        raise
                    break
                if not count:
                    break
                sent += count
        return sent

    def close(self) -> None:
        """Waits for a `send` in progress."""
        with self._lock:
            self._connection.close()


class TlsWriter:
    """OpenSSL encrypts what was read into one buffer, and sends it. Whoever has the connection lent may use it."""

    refused = False

    def __init__(self, file: RegionFile, connection: ssl.SSLSocket, buffer: memoryview, *, sums_up: bool) -> None:
        self.checksum = 0
        self._file = file
        self._connection = connection
        self._buffer = buffer
        self._sums_up = sums_up
        self._unsent = buffer[:0]
        """Already read; OpenSSL may have begun to send it, and wants the same bytes again."""

    def send(self, position: int, size_bytes: int) -> int:
        sent = 0
        while sent < size_bytes:
            if not self._unsent:
                piece = self._buffer[: size_bytes - sent]
                self._file.read_into(position + sent, piece)
                if self._sums_up:
                    self.checksum = crc64nvme(piece, self.checksum)
                self._unsent = piece
            try:
                count = self._connection.send(self._unsent)
            except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
                break
            self._unsent = self._unsent[count:]
            sent += count
        return sent

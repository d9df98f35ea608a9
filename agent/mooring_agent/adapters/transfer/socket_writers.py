"""Sends a file from a worker thread, some megabytes at a time, until the socket takes no more.

All methods block. They raise VolumeError if something is wrong with the file, and OSError if the connection broke.
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
    """Sends one file to a store.

    `refused`: this writer does not work for this file. `checksum`: the CRC64NVME of what was sent, or 0.
    """

    refused: bool
    checksum: int

    def send(self, position: int, size_bytes: int) -> int:
        """Send until `size_bytes` are sent or the socket is full; return how many were sent.

        `position` is where the last call ended.
        """


class SendfileWriter:
    """Has the kernel copy from the file to the socket. Some filesystems and some sandboxes have no sendfile."""

    def __init__(self, file: RegionFile, connection: socket.socket) -> None:
        """`connection` may be closed at once: the writer has a duplicate of its own."""
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
        """Close the duplicate, after a `send` in progress."""
        with self._lock:
            self._connection.close()


class TlsWriter:
    """Reads into one buffer, which OpenSSL encrypts and sends. For the thread to which the connection is lent."""

    refused = False

    def __init__(self, file: RegionFile, connection: ssl.SSLSocket, buffer: memoryview, *, sums_up: bool) -> None:
        self.checksum = 0
        self._file = file
        self._connection = connection
        self._buffer = buffer
        self._sums_up = sums_up
        self._unsent = buffer[:0]
        """What was read and not sent. OpenSSL may have begun to send it, and wants the same bytes again."""

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

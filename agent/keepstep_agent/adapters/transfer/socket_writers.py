"""Sends a file from a worker thread, which waits for the socket itself.

All methods block. They raise VolumeError if something is wrong with the file, and OSError if the connection broke.
"""

import errno
import select
import socket
import ssl
from collections.abc import Callable
from typing import Final, Protocol

from keepstep_agent.adapters.checksum import crc64nvme
from keepstep_agent.adapters.region_file import RegionFile
from keepstep_agent.adapters.transfer.thread_sockets import BUSY, wait_until_ready

_NO_SENDFILE: Final = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP})


class SocketWriter(Protocol):
    """Sends one file to a store.

    `refused`: this writer does not work for this file. `checksum`: the CRC64NVME of what was sent, or 0.
    """

    refused: bool
    checksum: int

    def send(self, position: int, size_bytes: int) -> int:
        """Send `size_bytes` and return how many were sent: fewer if the event loop has to look at the connection.

        `position` is where the last call ended.
        """

    def wait_for_room(self) -> bool:
        """Wait until the socket takes more; return whether to go on, or the event loop has to look at it."""


class SendfileWriter:
    """Has the kernel copy from the file to the socket. Some filesystems and some sandboxes have no sendfile."""

    def __init__(self, file: RegionFile, connection: socket.socket, on_moved: Callable[[], None]) -> None:
        self.refused = False
        self.checksum = 0
        self._file = file
        self._connection = connection
        self._on_moved = on_moved

    def send(self, position: int, size_bytes: int) -> int:
        sent = 0
        while sent < size_bytes:
            try:
                count = self._file.send(position + sent, size_bytes - sent, self._connection.fileno())
            except OSError as error:
                self.refused = error.errno in _NO_SENDFILE
                if not self.refused:
                    raise
                break
            sent += count
            if count:
                self._on_moved()
            else:
                self.wait_for_room()
        return sent

    def wait_for_room(self) -> bool:
        # The event loop reads this connection meanwhile, so it need not be waited for here.
        wait_until_ready(self._connection, select.POLLOUT)
        return True


class BufferWriter:
    """Reads into one buffer, from which the kernel or OpenSSL sends."""

    refused = False

    def __init__(
        self,
        file: RegionFile,
        connection: socket.socket,
        buffer: memoryview,
        on_moved: Callable[[], None],
        *,
        sums_up: bool,
    ) -> None:
        self.checksum = 0
        self._file = file
        self._connection = connection
        self._buffer = buffer
        self._on_moved = on_moved
        self._sums_up = sums_up
        self._unsent = buffer[:0]
        """What was read and not sent. OpenSSL may have begun to send it, and wants the same bytes again."""
        # The event loop cannot read a TLS connection that this thread has, so an early answer ends the sending.
        self._interruptions = select.POLLIN if isinstance(connection, ssl.SSLSocket) else 0

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
            except BUSY:
                if self.wait_for_room():
                    continue
                break
            self._unsent = self._unsent[count:]
            sent += count
            self._on_moved()
        return sent

    def wait_for_room(self) -> bool:
        return not wait_until_ready(self._connection, select.POLLOUT | self._interruptions) & self._interruptions

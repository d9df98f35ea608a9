"""Writes the body of an answer to a file: a worker thread takes it off the socket, buffer by buffer.

aiohttp would make several objects of every piece and copy it twice, all on the event loop. So while a body of known
length arrives, aiohttp is told to read no more, and one thread receives, computes the checksum and writes. Afterwards
aiohttp gets its connection back and may use it again. Where only aiohttp can read the connection, because the event
loop's own TLS is in between, the event loop fills the buffer.

Invariants: each body uses one buffer, whatever its size; a connection that brought more than the body serves no other
request. Bytes that arrive even later look like the next answer to any client, so callers check that an answer is the
one they asked for.
"""

import asyncio
import select
import socket
import ssl
from concurrent.futures import Executor
from contextlib import closing
from typing import Final

import aiohttp

from keepstep_agent.adapters.checksum import crc64nvme
from keepstep_agent.adapters.transfer.sink import PositionedFileWriter
from keepstep_agent.adapters.transfer.stall_timeout import StallTimeout
from keepstep_agent.adapters.transfer.thread_sockets import BUSY, LentSocket, wait_until_ready
from keepstep_agent.adapters.transfer.tls_transport import TlsTransport
from keepstep_agent.adapters.transfer.upload_body import BufferPool

_SUM_BYTES: Final = 256 * 1024
"""The checksum of so many bytes is computed at a time: they are still in the core's cache."""
_AT_ONCE_BYTES: Final = 256 * 1024
"""A thread waits for so many bytes, if that many are to come, and does not wake up for every packet."""
_TLS_RECORD_BYTES: Final = 17 * 1024
"""What OpenSSL may hold of a record that has not arrived whole."""


async def download(
    response: aiohttp.ClientResponse,
    descriptor: int,
    *,
    offset_bytes: int,
    size_bytes: int,
    buffers: BufferPool,
    executor: Executor,
    stall: StallTimeout,
) -> int:
    """Write exactly `size_bytes` of an answer's body at `offset_bytes`; return their CRC64NVME.

    `response` has just begun and says that its body has `size_bytes`. The stall time-out is suspended while only the
    disk is waited for. Raises aiohttp's ClientError if the body ends early, and VolumeError if the disk refuses. After
    either the connection is closed.
    """
    sink = PositionedFileWriter(descriptor, offset_bytes)
    buffer = buffers.take()
    body = _Body(size_bytes, buffer, sink, stall)
    # A short body may have arrived whole, and aiohttp has already released its connection.
    transport = response.connection.transport if response.connection else None
    try:
        if transport is None or isinstance(transport, TlsTransport) or not transport.get_extra_info("sslcontext"):
            await _receive_in_thread(response, body, executor)
        else:
            await _receive_here(response, body, executor)
    except BaseException:
        body.stop()
        # If aiohttp saw the end of a short body, the connection may already serve another request and is left alone.
        if transport is not None and not response.content.is_eof():
            transport.abort()
        # This waits for a write in progress. The buffer is dropped: the thread may still touch it.
        await asyncio.shield(asyncio.get_running_loop().run_in_executor(executor, sink.close))
        raise
    buffers.release(buffer)
    return body.checksum


async def _receive_in_thread(response: aiohttp.ClientResponse, body: "_Body", executor: Executor) -> None:
    stream = response.content
    while data := stream.read_nowait():
        if body.take(data):
            raise aiohttp.ClientPayloadError("more arrived at once than aiohttp keeps")
    connection = response.connection
    if stream.is_eof() or connection is None or connection.protocol is None or connection.transport is None:
        if body.missing_bytes:
            raise body.cut_off()
        await asyncio.get_running_loop().run_in_executor(executor, body.finish)
        return
    handler, transport = connection.protocol, connection.transport
    # This stops aiohttp's own time-out as well. Its parser never sees the rest of the body.
    handler.pause_reading()
    try:
        if isinstance(transport, TlsTransport):
            await transport.lend(executor, body.receive, transport.get_extra_info("socket"))
        else:
            with closing(LentSocket(transport)) as lent:
                await lent.lend(executor, body.receive, lent.connection)
    except OSError as error:
        raise body.cut_off() from error
    if body.brought_more:
        # The surplus would look like the next answer.
        handler.force_close()
    stream.feed_eof()


async def _receive_here(response: aiohttp.ClientResponse, body: "_Body", executor: Executor) -> None:
    loop = asyncio.get_running_loop()
    while body.missing_bytes:
        data = await response.content.readany()
        if not data:
            raise body.cut_off()
        while data := body.take(data):
            await loop.run_in_executor(executor, body.write)
    await loop.run_in_executor(executor, body.finish)


class _Body:
    """The bytes of one body on their way to the file. Methods that block are for a worker thread."""

    def __init__(self, size_bytes: int, buffer: memoryview, sink: PositionedFileWriter, stall: StallTimeout) -> None:
        self.checksum = 0
        self.missing_bytes = size_bytes
        self.brought_more = False
        self._size_bytes = size_bytes
        self._buffer = buffer
        self._filled = self._summed = 0
        self._sink = sink
        self._stall = stall
        self._stopped = False
        self._stall.moved()

    def take(self, data: bytes) -> bytes:
        """Copy bytes that have arrived into the buffer; return those for which it has no room.

        Raises ClientPayloadError if they are more than the body has.
        """
        if len(data) > self.missing_bytes:
            raise aiohttp.ClientPayloadError(f"more than {self._size_bytes} bytes arrived")
        count = min(len(data), len(self._buffer) - self._filled)
        self._buffer[self._filled : self._filled + count] = data[:count]
        self._arrived(count)
        return data[count:]

    def receive(self, connection: socket.socket) -> int:
        """Receive what is missing from a non-blocking socket, write everything, and return 0. Blocks.

        Raises ClientPayloadError if the connection breaks or `stop` is called, and VolumeError.
        """
        patience = _Patience(connection)
        while self.missing_bytes:
            if self._filled == len(self._buffer):
                self.write()
            room = self._buffer[self._filled : self._filled + self.missing_bytes]
            try:
                count = connection.recv_into(room)
            except BUSY as error:
                patience.wait(self.missing_bytes, error)
                count = -1
            except OSError as error:
                raise self.cut_off() from error
            if self._stopped or not count:
                raise self.cut_off()
            if count > 0:
                self._arrived(count)
        patience.end()
        self.finish()
        self.brought_more = _has_more(connection)
        return 0

    def write(self) -> None:
        """Write what the buffer holds, and empty it. Blocks."""
        self._sum_up()
        self._stall.allowed()
        self._sink.write(self._buffer[: self._filled])
        self._filled = self._summed = 0
        self._stall.moved()

    def finish(self) -> None:
        """Write the rest, and close the file. Blocks."""
        self.write()
        # From here on only the store's next answer is waited for, by another request.
        self._stall.allowed()
        self._sink.close()

    def stop(self) -> None:
        """Make `receive` in another thread raise soon."""
        self._stopped = True

    def cut_off(self) -> aiohttp.ClientPayloadError:
        return aiohttp.ClientPayloadError(
            f"{self._size_bytes - self.missing_bytes} bytes arrived instead of {self._size_bytes}"
        )

    def _arrived(self, count: int) -> None:
        self._filled += count
        self.missing_bytes -= count
        if self._filled - self._summed >= _SUM_BYTES:
            self._sum_up()
        self._stall.received(count)

    def _sum_up(self) -> None:
        self.checksum = crc64nvme(self._buffer[self._summed : self._filled], self.checksum)
        self._summed = self._filled


class _Patience:
    """Waits for a connection until much has arrived, and not for every packet."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._held_back_bytes = _TLS_RECORD_BYTES if isinstance(connection, ssl.SSLSocket) else 0
        self._at_once_bytes = 1

    def wait(self, missing_bytes: int, error: Exception) -> None:
        """`error` is what the connection raised; `missing_bytes` are still to come."""
        self._wait_for(max(1, min(_AT_ONCE_BYTES, missing_bytes - self._held_back_bytes)))
        wants_to_write = isinstance(error, ssl.SSLWantWriteError)
        wait_until_ready(self._connection, select.POLLOUT if wants_to_write else select.POLLIN)

    def end(self) -> None:
        """Leave the connection as it was."""
        self._wait_for(1)

    def _wait_for(self, size_bytes: int) -> None:
        if size_bytes != self._at_once_bytes:
            self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size_bytes)
            self._at_once_bytes = size_bytes


def _has_more(connection: socket.socket) -> bool:
    """Whether a connection from which nothing is expected brought something, if only its end."""
    try:
        connection.recv(1)
    except BUSY:
        return False
    except OSError:
        return True
    return True

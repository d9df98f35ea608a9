"""Writes the body of an answer to a file: the connection fills our buffers, and worker threads empty them.

aiohttp would make several objects of every piece and copy it twice. While a body of known length arrives, the transport
talks to a protocol of ours instead, by way of asyncio's `set_protocol` and `BufferedProtocol`. Afterwards aiohttp gets
its connection back and may use it again. Over TLS it works the same.

Invariants: each body uses two buffers, whatever its size; one buffer is written while the next fills, never two at
once, because parallel writes to one file only contend for its lock; a connection that brought more than the body serves
no other request. Bytes that arrive even later look like the next answer to any client, so callers check that an answer
is the one they asked for.
"""

import asyncio
from collections import deque
from concurrent.futures import Executor
from typing import Final

import aiohttp
from aiohttp.client_proto import ResponseHandler

from mooring_agent.adapters.checksum import crc64nvme
from mooring_agent.adapters.transfer.sink import PositionedFileWriter
from mooring_agent.adapters.transfer.stall_timeout import StallTimeout
from mooring_agent.adapters.transfer.upload_body import BufferPool

_BUFFERS: Final = 2


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
    loop = asyncio.get_running_loop()
    sink = PositionedFileWriter(descriptor, offset_bytes)
    receiver = _Receiver(response, size_bytes, buffers, stall)
    try:
        receiver.begin()
        written = 0
        while written < size_bytes:
            piece = await receiver.piece()
            await loop.run_in_executor(executor, sink.write, piece)
            written += len(piece)
            receiver.written()
        receiver.end()
        return receiver.checksum
    except BaseException:
        receiver.abort()
        raise
    finally:
        await asyncio.shield(loop.run_in_executor(executor, sink.close))


class _Receiver(asyncio.BufferedProtocol):
    """Takes the body off the connection. The caller alternates `piece` and `written`."""

    def __init__(
        self, response: aiohttp.ClientResponse, size_bytes: int, buffers: BufferPool, stall: StallTimeout
    ) -> None:
        self.checksum = 0
        self._stream = response.content
        self._missing = size_bytes
        self._size_bytes = size_bytes
        self._buffers = buffers
        self._stall = stall
        self._taken: list[memoryview] = []
        self._idle: deque[memoryview] = deque()
        self._full: deque[tuple[memoryview, int]] = deque()
        self._current: memoryview | None = None
        self._filled = 0
        self._changed = asyncio.Event()
        self._lost: BaseException | None = None
        self._surplus = memoryview(bytearray(1))
        self._brought_more = False
        connection = response.connection
        # A short body may have arrived whole, and aiohttp has already released its connection.
        self._handler: ResponseHandler | None = connection.protocol if connection else None
        self._transport: asyncio.Transport | None = connection.transport if connection else None

    def begin(self) -> None:
        """Take what aiohttp has already read of the body, then take over the connection."""
        while data := self._stream.read_nowait():
            self._take(data)
        if self._stream.is_eof() and self._missing:
            raise self._cut_off()
        if not self._missing:
            self._moved(0)
            return
        if self._handler is None or self._transport is None:
            raise self._cut_off()
        # This stops aiohttp's own time-out as well. Its parser never sees the rest of the body.
        self._handler.pause_reading()
        self._transport.set_protocol(self)
        if self._current is not None or self._next_buffer():
            self._transport.resume_reading()
        self._stall.moved()
        self._moved(0)

    async def piece(self) -> memoryview:
        """Return the next full buffer, or the last one. Raises ClientPayloadError if the connection was lost."""
        while not self._full:
            if self._lost:
                raise self._lost
            self._changed.clear()
            await self._changed.wait()
        buffer, size = self._full[0]
        return buffer[:size]

    def written(self) -> None:
        """Note that the piece was written: its buffer may be filled again."""
        self._idle.append(self._full.popleft()[0])
        if self._current is None and self._missing and self._transport is not None and self._next_buffer():
            self._transport.resume_reading()
        self._moved(0)

    def end(self) -> None:
        """Return the connection to aiohttp and the buffers to the pool.

        A connection that brought more than the body is closed: the surplus would look like the next answer.
        """
        if not self._stream.is_eof():
            if self._transport is not None and self._handler is not None:
                self._transport.set_protocol(self._handler)
                if self._brought_more:
                    self._handler.force_close()
            self._stream.feed_eof()
        for buffer in self._taken:
            self._buffers.release(buffer)

    def abort(self) -> None:
        """Abort the connection, and drop the buffers, which a thread may still read.

        If aiohttp saw the end of a short body, the connection may already serve another request and is left alone.
        """
        if self._transport is not None and self._handler is not None and not self._stream.is_eof():
            self._transport.set_protocol(self._handler)
            self._transport.abort()

    def get_buffer(self, sizehint: int) -> memoryview:
        if not self._missing:
            return self._surplus
        assert self._current is not None, "reading was paused"
        return self._current[self._filled : self._filled + self._missing]

    def buffer_updated(self, nbytes: int) -> None:
        if not self._missing:
            self._brought_more = True
            self._pause()
            return
        self._advance(nbytes)
        # With nothing missing, reading goes on, to notice bytes beyond the body.
        if self._missing and self._current is None and not self._next_buffer():
            self._pause()
        self._moved(nbytes)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = self._cut_off()
        self._changed.set()
        if self._handler is not None:
            self._handler.connection_lost(exc)
        self._transport = None

    def _take(self, data: bytes) -> None:
        while data:
            if len(data) > self._missing:
                raise aiohttp.ClientPayloadError(f"more than {self._size_bytes} bytes arrived")
            if self._current is None and not self._next_buffer():
                raise aiohttp.ClientPayloadError("more arrived at once than aiohttp keeps")
            assert self._current is not None
            room = self._current[self._filled :]
            count = min(len(room), len(data))
            room[:count] = data[:count]
            data = data[count:]
            self._advance(count)

    def _advance(self, count: int) -> None:
        assert self._current is not None
        # Here and not in the writing thread: the core's cache still holds what has just arrived.
        self.checksum = crc64nvme(self._current[self._filled : self._filled + count], self.checksum)
        self._filled += count
        self._missing -= count
        if self._filled == len(self._current) or not self._missing:
            self._full.append((self._current, self._filled))
            self._current = None
            self._changed.set()

    def _next_buffer(self) -> bool:
        """Make an idle buffer the current one; return whether there was any."""
        if not self._idle and len(self._taken) < _BUFFERS:
            buffer = self._buffers.take()
            self._taken.append(buffer)
            self._idle.append(buffer)
        if not self._idle:
            return False
        self._current, self._filled = self._idle.popleft(), 0
        return True

    def _pause(self) -> None:
        assert self._transport is not None
        self._transport.pause_reading()

    def _moved(self, size_bytes: int) -> None:
        """Report progress to the stall time-out, or suspend it while the store owes us nothing.

        That is when no buffer has room, or when nothing is missing: then only the disk is waited for.
        """
        if self._missing and self._current is not None:
            self._stall.received(size_bytes)
        else:
            self._stall.allowed()

    def _cut_off(self) -> aiohttp.ClientPayloadError:
        return aiohttp.ClientPayloadError(
            f"{self._size_bytes - self._missing} bytes arrived instead of {self._size_bytes}"
        )

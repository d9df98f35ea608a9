"""The bodies of uploads: a region of a file, verified while it is sent, or bytes in memory.

If the store checks the announced checksum, it refuses bytes that changed since, and the kernel may send the file
itself. Otherwise the checksum is computed again while the bytes leave. Worker threads send most of a region
(`send_by_kernel`, `send_encrypted`). The event loop sends its end, or all of it where the threads cannot (`pieces`).

Invariants: a body uses at most one buffer, whatever the size of its region; the last bytes leave only if the file is
still the one that was staged and, unless the store checks, every byte matches the expected checksum, so no store
completes a body that was not verified; the event loop never waits for a disk.

All bodies look like files to botocore, and wait for their turn under the rate limit. Bytes in memory were verified
already and nothing is read, so only the connection can fail.

Buffers are page-aligned, so that O_DIRECT takes them, and are reused. The pool owns only idle buffers. A buffer that a
thread or a transport may still touch is never given back: a cancelled task drops it, and the memory is freed with the
last reference to it.
"""

import asyncio
import mmap
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Executor
from functools import partial
from typing import Final, NoReturn

from mooring_agent.adapters.checksum import crc64nvme, require_checksum
from mooring_agent.adapters.rate_limit import RateLimiter
from mooring_agent.adapters.region_file import RegionFile
from mooring_agent.adapters.transfer.socket_writers import SendfileWriter, SocketWriter, TlsWriter
from mooring_agent.adapters.transfer.stall_timeout import StallTimeout
from mooring_agent.adapters.transfer.tls_transport import TlsTransport
from mooring_agent.core.errors import MooringError
from mooring_agent.core.model import Region

_MOST_IDLE: Final = 16


class BufferPool:
    """Buffers of one size, made when none is idle. For one event loop; not thread-safe."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._idle: list[memoryview] = []

    def take(self) -> memoryview:
        """Return a writable buffer of `size_bytes`, with whatever it held before."""
        return self._idle.pop() if self._idle else memoryview(mmap.mmap(-1, self.size_bytes))

    def release(self, buffer: memoryview) -> None:
        """Give back a whole buffer that `take` returned, once nothing else touches it."""
        assert len(buffer) == self.size_bytes
        if len(self._idle) < _MOST_IDLE:
            self._idle.append(buffer)


PIECE_BYTES: Final = 256 * 1024
"""A piece stays in a core's cache between the copy from the page cache, the checksum and the copy into the socket."""
BUFFER_BYTES: Final = 2 * PIECE_BYTES
"""How much a thread reads before it encrypts it. Each such round gives the interpreter's lock away three times."""
TURN_BYTES: Final = 4 * PIECE_BYTES
"""After this many bytes others get a turn on the event loop, although the kernel would take more."""


class UploadBody:
    """The body of an upload. Subclasses define its pieces.

    `payload_signature` is what the signer puts into x-amz-content-sha256 for it. `failure` says why it could not be
    sent; the HTTP library knows only that the connection broke. `sent_whole`: its last piece was handed out.
    """

    def __init__(
        self, size_bytes: int, *, limiter: RateLimiter, payload_signature: str, stall: StallTimeout | None
    ) -> None:
        self.payload_signature = payload_signature
        self.failure: MooringError | None = None
        self.sent_whole = False
        self._size_bytes = size_bytes
        self._limiter = limiter
        self._stall = stall

    def __len__(self) -> int:
        return self._size_bytes

    def read(self, size: int = -1) -> NoReturn:
        raise AssertionError("a body is never read on the event loop")

    def tell(self) -> int:
        return 0

    def seek(self, position: int, whence: int = os.SEEK_SET) -> int:
        """Do nothing: every sending starts at the first byte, so there is nothing to rewind."""
        assert (position, whence) == (0, os.SEEK_SET)
        return 0

    def pieces(self, start: int = 0) -> AsyncIterator[memoryview]:
        """Yield all bytes from `start` on, in order. Others get a turn before some pieces, but never after the last."""
        raise NotImplementedError

    async def _wait_for_turn(self, size_bytes: int) -> None:
        if not self._limiter.bytes_per_second:
            return
        if self._stall:
            self._stall.allowed()
        await self._limiter.take(size_bytes)
        self._moved()

    def _moved(self) -> None:
        """Report to the stall time-out that bytes have left."""
        if self._stall:
            self._stall.moved()


class BytesBody(UploadBody):
    """The body of an upload that is in memory. `data` must not change while a connection may hold pieces of it."""

    def __init__(self, data: bytearray, *, limiter: RateLimiter, payload_signature: str, stall: StallTimeout) -> None:
        super().__init__(len(data), limiter=limiter, payload_signature=payload_signature, stall=stall)
        self._data = memoryview(data)

    async def pieces(self, start: int = 0) -> AsyncIterator[memoryview]:
        for position in range(start, len(self), PIECE_BYTES):
            piece = self._data[position : position + PIECE_BYTES]
            end = position + len(piece)
            if end % TURN_BYTES == 0 and end < len(self):
                await asyncio.sleep(0)
            await self._wait_for_turn(len(piece))
            self.sent_whole = end == len(self)
            yield piece
            self._moved()


_BURST_BYTES: Final = 8 * 1024 * 1024
"""The most that a thread sends before others get a turn and the movement is reported."""
_Run = Callable[[Callable[[int, int], int], int, int], Awaitable[int]]


class FileBody(UploadBody):
    """The body of an upload that is a region of a file."""

    def __init__(
        self,
        file: RegionFile,
        region: Region,
        checksum: int,
        *,
        buffers: BufferPool,
        executor: Executor,
        limiter: RateLimiter,
        payload_signature: str = "",
        stall: StallTimeout | None = None,
        store_verifies: bool = False,
    ) -> None:
        """`file` is open; the caller closes it. `checksum` is the CRC64NVME that the region's bytes must have.

        `store_verifies`: the store was seen to refuse a body that does not match its announced checksum.
        """
        super().__init__(region.size_bytes, limiter=limiter, payload_signature=payload_signature, stall=stall)
        self.store_verifies = store_verifies
        self._executor = executor
        self._file = file
        self._region = region
        self._checksum = checksum
        self._buffers = buffers

    async def pieces(self, start: int = 0, checksum: int = 0) -> AsyncIterator[memoryview]:
        """Yield the region's bytes from `start` on, in order.

        Raises VolumeError instead of the last piece if the file changed. Unless the store verifies, it also counts as
        changed if the checksum of all bytes is not the announced one. `checksum` is that of the bytes before `start`.
        The next piece overwrites the last: ask for it only when done with the last.
        """
        buffer = self._buffers.take()
        size_bytes = self._region.size_bytes
        position = start
        try:
            while position < size_bytes:
                piece = buffer[: min(PIECE_BYTES, size_bytes - position)]
                await self._read(position, piece)
                if not self.store_verifies:
                    checksum = crc64nvme(piece, checksum)
                position += len(piece)
                if position == size_bytes:
                    await asyncio.get_running_loop().run_in_executor(self._executor, self._file.check)
                    if not self.store_verifies:
                        require_checksum(self._region, checksum, self._checksum)
                elif position % TURN_BYTES == 0:
                    await asyncio.sleep(0)
                await self._wait_for_turn(len(piece))
                self.sent_whole = position == size_bytes
                yield piece
                self._moved()
        except MooringError as error:
            self.failure = error
            raise
        # Not in a `finally`: after a cancellation a thread may still read into it.
        self._buffers.release(buffer)

    async def send_by_kernel(self, connection: socket.socket, writable: Callable[[], Awaitable[None]]) -> int:
        """Have the kernel send all but the last piece to a non-blocking socket; return how many bytes were sent.

        It sends fewer, and perhaps none, if sendfile does not work for this file. Raises VolumeError if the file ends
        early, and OSError if the connection broke. The caller sends the last piece, because an answer may come before a
        thread has reported that it is done.
        """
        assert self.store_verifies
        writer = SendfileWriter(self._file, connection)
        loop = asyncio.get_running_loop()
        try:
            return await self._send(writer, partial(loop.run_in_executor, self._executor), writable)
        finally:
            self._executor.submit(writer.close)

    async def send_encrypted(self, transport: TlsTransport) -> tuple[int, int]:
        """Send all but the last piece; return how many bytes were sent, and their checksum (0 if the store verifies).

        Errors as `send_by_kernel`.
        """
        buffer = self._buffers.take()
        connection = transport.get_extra_info("socket")
        writer = TlsWriter(self._file, connection, buffer, sums_up=not self.store_verifies)
        sent = await self._send(writer, partial(transport.lend, self._executor), transport.writable)
        # Not in a `finally`: after a cancellation a thread may still read into it.
        self._buffers.release(buffer)
        return sent, writer.checksum

    async def _send(self, writer: SocketWriter, run: _Run, writable: Callable[[], Awaitable[None]]) -> int:
        end = self._region.size_bytes - PIECE_BYTES
        position = 0
        try:
            while position < end and not writer.refused:
                limited = self._limiter.bytes_per_second
                burst_end = position + min(end - position, PIECE_BYTES if limited else _BURST_BYTES)
                await self._wait_for_turn(burst_end - position)
                while position < burst_end and not writer.refused:
                    position += await run(writer.send, position, burst_end - position)
                    self._moved()
                    if position < burst_end and not writer.refused:
                        await writable()
        except MooringError as error:
            self.failure = error
            raise
        return position

    async def _read(self, position: int, piece: memoryview) -> None:
        # Copy here what the checksum pass left in the page cache: a round trip to a thread costs more.
        count = self._file.read_cached(position, piece)
        if count < len(piece):
            await asyncio.get_running_loop().run_in_executor(
                self._executor, self._file.read_into, position + count, piece[count:]
            )

"""The bodies of uploads: a region of a file, verified while it is sent, or bytes in memory.

If the store checks the announced checksum, it refuses bytes that changed since, and the kernel may send the file
itself. Otherwise the checksum is computed again while the bytes leave. One worker thread sends nearly all of a region
(`send_plain`, `send_encrypted`). The event loop sends its end, or all of it where the threads cannot (`pieces`).

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
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Executor
from functools import partial
from typing import Final, NoReturn

from keepstep_agent.adapters.checksum import crc64nvme, require_checksum
from keepstep_agent.adapters.rate_limit import RateLimiter
from keepstep_agent.adapters.region_file import RegionFile
from keepstep_agent.adapters.transfer.socket_writers import BufferWriter, SendfileWriter, SocketWriter
from keepstep_agent.adapters.transfer.stall_timeout import StallTimeout
from keepstep_agent.adapters.transfer.thread_sockets import LentSocket
from keepstep_agent.adapters.transfer.tls_transport import TlsTransport
from keepstep_agent.core.errors import KeepstepError
from keepstep_agent.core.model import Region

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
        self.failure: KeepstepError | None = None
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
        """Prepare for another sending, which starts at the first byte as the first one did."""
        assert (position, whence) == (0, os.SEEK_SET)
        self.sent_whole = False
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

    def __init__(
        self, data: bytes | bytearray, *, limiter: RateLimiter, payload_signature: str, stall: StallTimeout
    ) -> None:
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


_LOOK_BYTES: Final = 8 * 1024 * 1024
"""After so many bytes a thread looks whether there is a cap by now."""
_LAST_BYTES: Final = 16 * 1024
_Run = Callable[..., Awaitable[int]]


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
        # What is left for the event loop. A region of one piece is not worth a thread.
        self._last_at = region.size_bytes - _LAST_BYTES if region.size_bytes > PIECE_BYTES else 0
        self._last: memoryview | None = None

    def seek(self, position: int, whence: int = os.SEEK_SET) -> int:
        self._last = None
        return super().seek(position, whence)

    async def pieces(self, start: int = 0, checksum: int = 0) -> AsyncIterator[memoryview]:
        """Yield the region's bytes from `start` on, in order.

        Raises VolumeError instead of the last piece if the file changed. Unless the store verifies, it also counts as
        changed if the checksum of all bytes is not the announced one. `checksum` is that of the bytes before `start`.
        The next piece overwrites the last: ask for it only when done with the last.
        """
        if self._last is not None:
            assert start == self._last_at
            await self._wait_for_turn(len(self._last))
            self.sent_whole = True
            yield self._last
            self._moved()
            return
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
        except KeepstepError as error:
            self.failure = error
            raise
        # Not in a `finally`: after a cancellation a thread may still read into it.
        self._buffers.release(buffer)

    async def send_plain(self, lent: LentSocket) -> tuple[int, int]:
        """Send all but the last piece from a thread; return how many bytes were sent, and their checksum.

        The checksum is 0 if the store verifies. Then the kernel sends the file, and fewer bytes, perhaps none, were
        sent if it cannot. Raises VolumeError if the file changed or ends early, and OSError if the connection broke.
        The caller sends the last piece, because an answer may come before a thread has reported that it is done.
        """
        run = partial(lent.lend, self._executor)
        if self.store_verifies:
            return await self._send(SendfileWriter(self._file, lent.connection, self._moved), run), 0
        return await self._send_buffered(lent.connection, run)

    async def send_encrypted(self, transport: TlsTransport) -> tuple[int, int]:
        """Do the same as `send_plain` over TLS."""
        connection: ssl.SSLSocket = transport.get_extra_info("socket")
        return await self._send_buffered(connection, partial(transport.lend, self._executor), transport.writable)

    async def _send_buffered(
        self, connection: socket.socket, run: _Run, writable: Callable[[], Awaitable[None]] | None = None
    ) -> tuple[int, int]:
        buffer = self._buffers.take()
        writer = BufferWriter(self._file, connection, buffer, self._moved, sums_up=not self.store_verifies)
        sent = await self._send(writer, run, writable)
        # Not in a `finally`: after a cancellation a thread may still read into it.
        self._buffers.release(buffer)
        return sent, writer.checksum

    async def _send(
        self, writer: SocketWriter, run: _Run, writable: Callable[[], Awaitable[None]] | None = None
    ) -> int:
        position = 0
        try:
            while position < self._last_at and not writer.refused:
                capped = self._limiter.bytes_per_second
                left = self._last_at - position
                burst_end = position + (min(left, PIECE_BYTES) if capped else left)
                await self._wait_for_turn(burst_end - position)
                # What a cap allowed may be sent. What began without one pays once there is one.
                while position < burst_end and (capped or not self._limiter.bytes_per_second) and not writer.refused:
                    position = await run(self._burst, writer, position, burst_end)
                    if position < burst_end and writable:
                        await writable()
        except KeepstepError as error:
            self.failure = error
            raise
        return position

    def _burst(self, writer: SocketWriter, position: int, end: int) -> int:
        """Send to `end`, and get the last piece ready if that is next; return how far it went. For a worker thread.

        It stops earlier where the writer does, and when a cap is set meanwhile.
        """
        capped = self._limiter.bytes_per_second
        while position < end and self._limiter.bytes_per_second == capped:
            size_bytes = min(end - position, _LOOK_BYTES)
            sent = writer.send(position, size_bytes)
            position += sent
            if sent < size_bytes:
                break
        if position == self._last_at:
            self._prepare_last(writer.checksum)
            writer.wait_for_room()
        return position

    def _prepare_last(self, checksum: int) -> None:
        last = memoryview(bytearray(_LAST_BYTES))
        self._file.read_into(self._last_at, last)
        self._file.check()
        if not self.store_verifies:
            require_checksum(self._region, crc64nvme(last, checksum), self._checksum)
        self._last = last

    async def _read(self, position: int, piece: memoryview) -> None:
        # Copy here what the checksum pass left in the page cache: a round trip to a thread costs more.
        count = self._file.read_cached(position, piece)
        if count < len(piece):
            await asyncio.get_running_loop().run_in_executor(
                self._executor, self._file.read_into, position + count, piece[count:]
            )

"""A region of a file on its way out, verified while it leaves.

Where the store checks the checksum that was announced to it, the kernel may send the file itself (`send`): bytes that
changed since are refused at the other end. Everywhere else they are read piece by piece into one buffer and summed up
again (`pieces`). Invariants: memory is one buffer at most, whatever the size of the region; the last bytes leave only
if the file is still the one that was staged and, where nobody else looks, every byte has the expected checksum: so no
store completes a body that was not verified; the event loop never waits for a disk.
"""

import asyncio
import errno
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Executor
from typing import Final

from mooring_agent.adapters.checksum import crc64nvme, require_checksum
from mooring_agent.adapters.rate_limit import RateLimiter
from mooring_agent.adapters.region_file import RegionFile
from mooring_agent.adapters.transfer.buffers import BufferPool
from mooring_agent.adapters.transfer.silence import Silence
from mooring_agent.adapters.transfer.upload_body import PIECE_BYTES, TURN_BYTES, UploadBody
from mooring_agent.core.errors import MooringError
from mooring_agent.core.model import Region

_BURST_BYTES: Final = 8 * 1024 * 1024
"""What a thread has the kernel send before others have their turn, and before we say that something moved."""
_NO_SENDFILE: Final = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP})


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
        silence: Silence | None = None,
        store_verifies: bool = False,
    ) -> None:
        """`file` is open and the caller's to close. `checksum` is the CRC64NVME that its bytes must have.

        `store_verifies`: it was seen to refuse a body that has not the checksum it was told.
        """
        super().__init__(region.size_bytes, limiter=limiter, payload_signature=payload_signature, silence=silence)
        self.store_verifies = store_verifies
        self._executor = executor
        self._file = file
        self._region = region
        self._checksum = checksum
        self._buffers = buffers

    async def pieces(self, start: int = 0) -> AsyncIterator[memoryview]:
        """The region's bytes from `start` on, in order; VolumeError instead of the last piece if the file changed.

        Unless the store looks itself, it did if the checksum of its bytes is not what was announced. A piece is
        overwritten by the next one: whoever asks for that one must be done with it.
        """
        buffer = self._buffers.take()
        size_bytes = self._region.size_bytes
        position, checksum = start, 0
        try:
            while position < size_bytes:
                piece = buffer[: size_bytes - position]
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
        # Not in a `finally`: what was cancelled may have a thread that still reads into it.
        self._buffers.give_back(buffer)

    async def send(self, connection: socket.socket, writable: Callable[[], Awaitable[None]]) -> int:
        """Have the kernel send all but the last piece to a socket that does not block; returns how many bytes that is.

        Fewer, and perhaps none, where it will not for this file. VolumeError if the file ends early; OSError if the
        connection broke. `connection` may be closed at once: threads use a duplicate. The last piece is the caller's:
        an answer may come before a thread has said that it is done.
        """
        assert self.store_verifies
        end = self._region.size_bytes - PIECE_BYTES
        if end <= 0:
            return 0
        outlet = _Outlet(self._file, connection)
        position = 0
        try:
            while position < end and not outlet.refused:
                limited = self._limiter.bytes_per_second
                size_bytes = min(end - position, PIECE_BYTES if limited else _BURST_BYTES)
                await self._wait_for_turn(size_bytes)
                position += await self._send_burst(outlet, position, size_bytes, writable)
        except MooringError as error:
            self.failure = error
            raise
        finally:
            self._executor.submit(outlet.close)
        return position

    async def _send_burst(
        self, outlet: "_Outlet", position: int, size_bytes: int, writable: Callable[[], Awaitable[None]]
    ) -> int:
        sent = 0
        while sent < size_bytes and not outlet.refused:
            sent += await asyncio.get_running_loop().run_in_executor(
                self._executor, outlet.send, position + sent, size_bytes - sent
            )
            self._moved()
            if sent < size_bytes and not outlet.refused:
                await writable()
        return sent

    async def _read(self, position: int, piece: memoryview) -> None:
        # What the checksum pass brought into the page cache is copied here and now: a thread and back costs more.
        count = self._file.read_cached(position, piece)
        if count < len(piece):
            await asyncio.get_running_loop().run_in_executor(
                self._executor, self._file.read_into, position + count, piece[count:]
            )


class _Outlet:
    """A file and the socket that it goes to, for worker threads; the socket is a duplicate of its own."""

    def __init__(self, file: RegionFile, connection: socket.socket) -> None:
        self.refused = False
        """Some filesystems, and some sandboxes, have no sendfile."""
        self._file = file
        self._connection = connection.dup()
        self._lock = threading.Lock()

    def send(self, position: int, size_bytes: int) -> int:
        """Send until that much is sent, or the socket is full; how many bytes."""
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

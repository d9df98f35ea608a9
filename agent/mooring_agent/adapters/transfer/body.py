"""A region of a file on its way out, verified while it leaves.

Where the store checks the checksum that was announced to it, the kernel may send the file itself (`send`): bytes that
changed since are refused at the other end. Everywhere else they are read piece by piece into one buffer and summed up
again (`pieces`). Invariants: memory is one buffer at most, whatever the size of the region; the last bytes leave only
if the file is still the one that was staged and, where nobody else looks, every byte has the expected checksum: so no
store completes a body that was not verified; the event loop never waits for a disk.
"""

import asyncio
import os
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Executor
from typing import Final, NoReturn

from mooring_agent.adapters.checksum import crc64nvme
from mooring_agent.adapters.rate_limit import RateLimiter
from mooring_agent.adapters.region_file import RegionFile, file_changed
from mooring_agent.adapters.transfer.buffers import BufferPool
from mooring_agent.adapters.transfer.silence import Silence
from mooring_agent.core.errors import MooringError
from mooring_agent.core.model import Region

PIECE_BYTES: Final = 256 * 1024
"""It stays in a core's cache between the copy from the page cache, the checksum and the copy into the socket."""

_EXTENT_BYTES: Final = 4 * 1024 * 1024
"""What the kernel is asked to send at once: a thread needs the interpreter's lock between two."""


class FileBody:
    """The body of an upload.

    To botocore it looks like a file; `payload_signature` is what the signer puts into x-amz-content-sha256 for it.
    `failure` is why the region could not be sent: the HTTP library knows only that the connection broke.
    """

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
        self.payload_signature = payload_signature
        self.failure: MooringError | None = None
        self.store_verifies = store_verifies
        self._executor = executor
        self._silence = silence
        self._file = file
        self._region = region
        self._checksum = checksum
        self._buffers = buffers
        self._limiter = limiter

    def __len__(self) -> int:
        return self._region.size_bytes

    def read(self, size: int = -1) -> NoReturn:
        raise AssertionError("a region is never read on the event loop")

    def tell(self) -> int:
        return 0

    def seek(self, position: int, whence: int = os.SEEK_SET) -> int:
        """Every sending starts at the first byte: there is nothing to rewind."""
        assert (position, whence) == (0, os.SEEK_SET)
        return 0

    async def pieces(self) -> AsyncIterator[memoryview]:
        """The region's bytes in order; VolumeError instead of the last piece if they are not what was announced.

        A piece is overwritten by the next one: whoever asks for that one must be done with it.
        """
        buffer = self._buffers.take()
        size_bytes = self._region.size_bytes
        position = checksum = 0
        try:
            while position < size_bytes:
                piece = buffer[: size_bytes - position]
                await self._read(position, piece)
                checksum = crc64nvme(piece, checksum)
                position += len(piece)
                if position == size_bytes:
                    await self._check(checksum)
                await self._wait_for_turn(len(piece))
                yield piece
                self.moved()
        except MooringError as error:
            self.failure = error
            raise
        # Not in a `finally`: what was cancelled may have a thread that still reads into it.
        self._buffers.give_back(buffer)

    async def send(self, connection: socket.socket, writable: Callable[[], Awaitable[None]]) -> None:
        """Have the kernel send it all to a socket that does not block. Only where the store verifies.

        VolumeError before the last bytes if the file is not the one that was staged; OSError if the connection broke.
        `connection` is closed before this returns, but never while a thread uses it.
        """
        assert self.store_verifies
        loop = asyncio.get_running_loop()
        outlet = _Outlet(self._file, self._region, connection)
        position = 0
        try:
            while position < self._region.size_bytes:
                size_bytes = self._region.size_bytes - position
                if self._limiter.bytes_per_second:
                    size_bytes = min(size_bytes, PIECE_BYTES)
                    await self._wait_for_turn(size_bytes)
                end = position + size_bytes
                while position < end:
                    sent = await loop.run_in_executor(self._executor, outlet.send, position, end)
                    self.moved()
                    position += sent
                    if position < end:
                        await writable()
        except MooringError as error:
            self.failure = error
            raise
        finally:
            self._executor.submit(outlet.close)

    def moved(self) -> None:
        """Something left."""
        if self._silence:
            self._silence.broken()

    async def _read(self, position: int, piece: memoryview) -> None:
        # What the checksum pass brought into the page cache is copied here and now: a thread and back costs more.
        count = self._file.read_cached(position, piece)
        if count < len(piece):
            await asyncio.get_running_loop().run_in_executor(
                self._executor, self._file.read_into, position + count, piece[count:]
            )

    async def _check(self, checksum: int) -> None:
        await asyncio.get_running_loop().run_in_executor(self._executor, self._file.check)
        if checksum != self._checksum:
            region = self._region
            raise file_changed(
                region.path,
                f"bytes {region.offset_bytes} to {region.offset_bytes + region.size_bytes} have "
                f"checksum {checksum:016x} instead of {self._checksum:016x}",
            )

    async def _wait_for_turn(self, size_bytes: int) -> None:
        if not self._limiter.bytes_per_second:
            return
        if self._silence:
            self._silence.allowed()
        await self._limiter.take(size_bytes)
        self.moved()


class _Outlet:
    """A region's file and the socket that it goes to, for worker threads."""

    def __init__(self, file: RegionFile, region: Region, connection: socket.socket) -> None:
        self._file = file
        self._size_bytes = region.size_bytes
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, position: int, end: int) -> int:
        """Send from `position` up to `end`, or until the socket is full; how many bytes."""
        start = position
        with self._lock:
            while position < end:
                size_bytes = min(end - position, _EXTENT_BYTES)
                if position + size_bytes == self._size_bytes:
                    self._file.check()
                sent = self._file.send(position, size_bytes, self._connection.fileno())
                if not sent:
                    break
                position += sent
        return position - start

    def close(self) -> None:
        """Waits for a `send` in progress; later ones fail."""
        with self._lock:
            self._connection.close()

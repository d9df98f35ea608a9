"""A region of a file on its way out, verified while it leaves.

Where the store checks the checksum that was announced to it, bytes that changed since are refused at the other end, and
the kernel may send the file itself. Where nobody else looks they are summed up again as they leave. Most of a region is
sent by worker threads (`send_by_kernel`, `send_encrypted`), its end, and all of it where they cannot, by the event loop
(`pieces`).

Invariants: memory is one buffer at most, whatever the size of the region; the last bytes leave only if the file is
still the one that was staged and, where nobody else looks, every byte has the expected checksum: so no store completes
a body that was not verified; the event loop never waits for a disk.
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Executor
from functools import partial
from typing import Final

from mooring_agent.adapters.checksum import crc64nvme, require_checksum
from mooring_agent.adapters.rate_limit import RateLimiter
from mooring_agent.adapters.region_file import RegionFile
from mooring_agent.adapters.transfer.buffers import BufferPool
from mooring_agent.adapters.transfer.outlet import EncryptingOutlet, KernelOutlet, Outlet
from mooring_agent.adapters.transfer.silence import Silence
from mooring_agent.adapters.transfer.tls_transport import TlsTransport
from mooring_agent.adapters.transfer.upload_body import PIECE_BYTES, TURN_BYTES, UploadBody
from mooring_agent.core.errors import MooringError
from mooring_agent.core.model import Region

_BURST_BYTES: Final = 8 * 1024 * 1024
"""What a thread sends before others have their turn, and before we say that something moved."""
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

    async def pieces(self, start: int = 0, checksum: int = 0) -> AsyncIterator[memoryview]:
        """The region's bytes from `start` on, in order; VolumeError instead of the last piece if the file changed.

        `checksum` is that of the bytes before. Unless the store looks itself, the file has changed if the checksum of
        all is not what was announced. A piece is overwritten by the next one: whoever asks for that is done with it.
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
        # Not in a `finally`: what was cancelled may have a thread that still reads into it.
        self._buffers.give_back(buffer)

    async def send_by_kernel(self, connection: socket.socket, writable: Callable[[], Awaitable[None]]) -> int:
        """Have the kernel send all but the last piece to a socket that does not block; returns how many bytes that is.

        Fewer, and perhaps none, where it will not for this file. VolumeError if the file ends early; OSError if the
        connection broke. The last piece is the caller's: an answer may come before a thread has said that it is done.
        """
        assert self.store_verifies
        outlet = KernelOutlet(self._file, connection)
        loop = asyncio.get_running_loop()
        try:
            return await self._send(outlet, partial(loop.run_in_executor, self._executor), writable)
        finally:
            self._executor.submit(outlet.close)

    async def send_encrypted(self, transport: TlsTransport) -> tuple[int, int]:
        """Send all but the last piece; returns how many bytes that is, and their checksum where it is needed.

        Errors as `send_by_kernel`.
        """
        buffer = self._buffers.take()
        connection = transport.get_extra_info("socket")
        outlet = EncryptingOutlet(self._file, connection, buffer, sums_up=not self.store_verifies)
        sent = await self._send(outlet, partial(transport.lend, self._executor), transport.writable)
        # Not in a `finally`: what was cancelled may have a thread that still reads into it.
        self._buffers.give_back(buffer)
        return sent, outlet.checksum

    async def _send(self, outlet: Outlet, run: _Run, writable: Callable[[], Awaitable[None]]) -> int:
        end = self._region.size_bytes - PIECE_BYTES
        position = 0
        try:
            while position < end and not outlet.refused:
                limited = self._limiter.bytes_per_second
                burst_end = position + min(end - position, PIECE_BYTES if limited else _BURST_BYTES)
                await self._wait_for_turn(burst_end - position)
                while position < burst_end and not outlet.refused:
                    position += await run(outlet.send, position, burst_end - position)
                    self._moved()
                    if position < burst_end and not outlet.refused:
                        await writable()
        except MooringError as error:
            self.failure = error
            raise
        return position

    async def _read(self, position: int, piece: memoryview) -> None:
        # What the checksum pass brought into the page cache is copied here and now: a thread and back costs more.
        count = self._file.read_cached(position, piece)
        if count < len(piece):
            await asyncio.get_running_loop().run_in_executor(
                self._executor, self._file.read_into, position + count, piece[count:]
            )

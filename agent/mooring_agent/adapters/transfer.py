"""How the bytes of a file region reach a socket, and how an answer's bytes reach a preallocated file.

Owns pieces, buffers and the watch for silence; knows nothing of S3. Invariants: memory per transfer is a few pieces,
whatever the size of the part; the last piece of an upload leaves only after every byte was read, its checksum is the
expected one and the file is still the one that was staged, so that no store can complete a body that was not verified;
nothing here reads or writes a disk on the event loop.
"""

import asyncio
import os
import socket
import struct
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor
from types import TracebackType
from typing import Final, NoReturn

import aiohttp
from aiohttp.abc import AbstractStreamWriter
from aiohttp.payload import Payload, payload_type

from mooring_agent.adapters.checksum import crc64nvme
from mooring_agent.adapters.rate_limit import RateLimiter
from mooring_agent.adapters.region_file import RegionFile, file_changed
from mooring_agent.adapters.volume.errors import volume_error
from mooring_agent.core.errors import MooringError
from mooring_agent.core.model import Region

PIECE_BYTES: Final = 512 * 1024
WRITE_BYTES: Final = 1024 * 1024


class Silence:
    """Ends what runs inside it with TimeoutError when nothing was heard or sent for `seconds`.

    aiohttp's own read time-out starts only after the body is sent: without this a stalled upload would wait for ever.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._timeout = asyncio.timeout(seconds)

    async def __aenter__(self) -> "Silence":
        await self._timeout.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._timeout.__aexit__(kind, error, trace)

    def broken(self) -> None:
        """Something moved."""
        if not self._timeout.expired():
            self._timeout.reschedule(asyncio.get_running_loop().time() + self._seconds)

    def allowed(self) -> None:
        """We are the ones who wait, on purpose."""
        if not self._timeout.expired():
            self._timeout.reschedule(None)


class FileBody:
    """The body of an upload: a region of a file, verified while it leaves.

    To botocore it looks like a file; `payload_signature` is what the signer puts into x-amz-content-sha256 for it.
    `failure` is why the region could not be sent: the HTTP library knows only that the connection broke.
    """

    def __init__(
        self,
        file: RegionFile,
        region: Region,
        checksum: int,
        *,
        executor: Executor,
        limiter: RateLimiter,
        payload_signature: str = "",
        silence: Silence | None = None,
    ) -> None:
        self.payload_signature = payload_signature
        self.silence = silence
        self.failure: MooringError | None = None
        self._file = file
        self._region = region
        self._checksum = checksum
        self._executor = executor
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

    async def pieces(self) -> AsyncIterator[bytes]:
        """The region's bytes in order; VolumeError instead of the last piece if they are not what was announced."""
        loop = asyncio.get_running_loop()
        position = checksum = 0
        try:
            while position < self._region.size_bytes:
                piece, checksum = await loop.run_in_executor(self._executor, self._read_piece, position, checksum)
                position += len(piece)
                if self.silence:
                    self.silence.allowed()
                await self._limiter.take(len(piece))
                if self.silence:
                    self.silence.broken()
                yield piece
        except MooringError as error:
            self.failure = error
            raise

    def _read_piece(self, position: int, checksum: int) -> tuple[bytes, int]:
        piece = self._file.read(position, min(PIECE_BYTES, self._region.size_bytes - position))
        checksum = crc64nvme(piece, checksum)
        if position + len(piece) == self._region.size_bytes:
            self._file.check()
            if checksum != self._checksum:
                raise file_changed(
                    self._region.path,
                    f"bytes {self._region.offset_bytes} to {self._region.offset_bytes + self._region.size_bytes} have "
                    f"checksum {checksum:016x} instead of {self._checksum:016x}",
                )
        return piece, checksum


@payload_type(FileBody)
class FilePayload(Payload):
    """Writes a FileBody to a connection. Each piece is its own `bytes`: transports keep what they cannot send yet."""

    _value: FileBody
    _autoclose = True

    def __init__(self, value: FileBody, *arguments: object, **options: object) -> None:
        super().__init__(value, *arguments, **options)  # type: ignore[arg-type]
        self._size = len(value)

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> NoReturn:
        raise AssertionError("a region never becomes a string")

    async def write(self, writer: AbstractStreamWriter) -> None:
        await self.write_with_length(writer, None)

    async def write_with_length(self, writer: AbstractStreamWriter, content_length: int | None) -> None:
        assert content_length in (None, len(self._value))
        if writer.transport:
            forget_unsent_on_close(writer.transport)
        try:
            async for piece in self._value.pieces():
                await writer.write(piece)
                if self._value.silence:
                    self._value.silence.broken()
        except BaseException:
            # A mere close would first try to send what is buffered, and wait for a peer that may not read.
            if writer.transport:
                writer.transport.abort()
            raise


def forget_unsent_on_close(transport: asyncio.WriteTransport) -> None:
    """Let a close reset the connection: of an upload that is cancelled, the kernel still holds megabytes.

    On a slow line they would take seconds that belong to the just-in-time save for whose sake it was cancelled.
    """
    connection = transport.get_extra_info("socket")
    if connection is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


class Sink:
    """Writes batches of an object's bytes to a file, in order, from worker threads.

    It owns a duplicate of the descriptor: a cancelled caller may close its own while a thread still writes.
    """

    def __init__(self, descriptor: int, offset_bytes: int) -> None:
        self._lock = threading.Lock()
        self._descriptor = os.dup(descriptor)
        self._offset = offset_bytes
        self.checksum = 0

    def write(self, batch: Sequence[bytes]) -> None:
        with self._lock:
            if self._descriptor < 0:
                return
            for data in batch:
                view = memoryview(data)
                while view:
                    try:
                        count = os.pwrite(self._descriptor, view, self._offset)
                    except OSError as error:
                        raise volume_error(error, "write the file being restored") from error
                    self._offset += count
                    view = view[count:]
                self.checksum = crc64nvme(data, self.checksum)

    def close(self) -> None:
        """Waits for a write in progress; later ones do nothing."""
        with self._lock:
            os.close(self._descriptor)
            self._descriptor = -1


async def download(
    stream: aiohttp.StreamReader,
    descriptor: int,
    *,
    offset_bytes: int,
    size_bytes: int,
    executor: Executor,
    progress: Callable[[], None],
) -> int:
    """Write exactly `size_bytes` of `stream` at `offset_bytes`; returns their CRC64NVME.

    aiohttp's ClientError if the stream ends early or brings more; VolumeError if the disk refuses. One batch is written
    while the next arrives, never two: parallel writes to one file only fight over its lock.
    """
    loop = asyncio.get_running_loop()
    sink = Sink(descriptor, offset_bytes)
    writing: asyncio.Future[None] | None = None
    try:
        received = 0
        batch: list[bytes] = []
        batch_bytes = 0
        while received < size_bytes:
            data = await stream.readany()
            if not data or received + len(data) > size_bytes:
                raise aiohttp.ClientPayloadError(f"{received + len(data)} bytes arrived instead of {size_bytes}")
            progress()
            batch.append(data)
            received += len(data)
            batch_bytes += len(data)
            if batch_bytes >= WRITE_BYTES or received == size_bytes:
                if writing:
                    await writing
                writing = loop.run_in_executor(executor, sink.write, batch)
                batch, batch_bytes = [], 0
        if writing:
            await writing
            progress()
        return sink.checksum
    finally:
        if writing and not writing.cancel() and not writing.cancelled():
            writing.exception()  # a failure of the disk that came second to another failure
        await asyncio.shield(loop.run_in_executor(executor, sink.close))

"""How bytes in memory that were verified already reach a socket: piece by piece, within the bandwidth cap.

Like `transfer.FileBody`, which is for regions of files. Here nothing is read, so nothing can fail but the connection.
"""

import os
from typing import Final, NoReturn

from aiohttp.abc import AbstractStreamWriter
from aiohttp.payload import Payload, payload_type

from mooring_agent.adapters.rate_limit import RateLimiter
from mooring_agent.adapters.transfer import Silence, forget_unsent_on_close

PIECE_BYTES: Final = 512 * 1024


class BytesBody:
    """To botocore it looks like a file; `payload_signature` is what the signer puts into x-amz-content-sha256 for it.

    `data` must not change as long as a connection may hold pieces of it.
    """

    def __init__(self, data: bytearray, *, payload_signature: str, limiter: RateLimiter, silence: Silence) -> None:
        self.payload_signature = payload_signature
        self._data = memoryview(data)
        self._limiter = limiter
        self._silence = silence

    def __len__(self) -> int:
        return len(self._data)

    def read(self, size: int = -1) -> NoReturn:
        raise AssertionError("nobody copies what is in memory already")

    def tell(self) -> int:
        return 0

    def seek(self, position: int, whence: int = os.SEEK_SET) -> int:
        """Every sending starts at the first byte: there is nothing to rewind."""
        assert (position, whence) == (0, os.SEEK_SET)
        return 0

    async def write(self, writer: AbstractStreamWriter) -> None:
        for position in range(0, len(self._data), PIECE_BYTES):
            piece = self._data[position : position + PIECE_BYTES]
            self._silence.allowed()
            await self._limiter.take(len(piece))
            self._silence.broken()
            await writer.write(piece)
            self._silence.broken()


@payload_type(BytesBody)
class BytesPayload(Payload):
    """Writes a BytesBody to a connection."""

    _value: BytesBody
    _autoclose = True

    def __init__(self, value: BytesBody, *arguments: object, **options: object) -> None:
        super().__init__(value, *arguments, **options)  # type: ignore[arg-type]
        self._size = len(value)

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> NoReturn:
        raise AssertionError("an archive never becomes a string")

    async def write(self, writer: AbstractStreamWriter) -> None:
        await self.write_with_length(writer, None)

    async def write_with_length(self, writer: AbstractStreamWriter, content_length: int | None) -> None:
        assert content_length in (None, len(self._value))
        if writer.transport:
            forget_unsent_on_close(writer.transport)
        try:
            await self._value.write(writer)
        except BaseException:
            # A mere close would first try to send what is buffered, and wait for a peer that may not read.
            if writer.transport:
                writer.transport.abort()
            raise

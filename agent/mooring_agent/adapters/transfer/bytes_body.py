"""Bytes in memory on their way out. They were verified already, and nothing is read: only the line can fail.

Like `body.FileBody`, which is for regions of files.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from typing import Final, NoReturn

from mooring_agent.adapters.rate_limit import RateLimiter
from mooring_agent.adapters.transfer.body import PIECE_BYTES
from mooring_agent.adapters.transfer.silence import Silence
from mooring_agent.core.errors import MooringError

_TURN_BYTES: Final = 4 * PIECE_BYTES


class BytesBody:
    """The body of an upload, as aiobotocore sees it: a file.

    `data` must not change as long as a connection may hold pieces of it. The other arguments are those of FileBody.
    """

    failure: MooringError | None = None
    sent_whole = False

    def __init__(self, data: bytearray, *, limiter: RateLimiter, payload_signature: str, silence: Silence) -> None:
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

    async def pieces(self, start: int = 0) -> AsyncIterator[memoryview]:
        """All bytes from `start` on, in order. Before some, but not the last, others have their turn on the loop."""
        for position in range(start, len(self._data), PIECE_BYTES):
            piece = self._data[position : position + PIECE_BYTES]
            end = position + len(piece)
            if end % _TURN_BYTES == 0 and end < len(self._data):
                await asyncio.sleep(0)
            if self._limiter.bytes_per_second:
                self._silence.allowed()
                await self._limiter.take(len(piece))
                self._silence.broken()
            self.sent_whole = end == len(self._data)
            yield piece
            self._silence.broken()

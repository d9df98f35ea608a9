"""Bytes in memory on their way out. They were verified already, and nothing is read: only the line can fail."""

import asyncio
from collections.abc import AsyncIterator

from mooring_agent.adapters.rate_limit import RateLimiter
from mooring_agent.adapters.transfer.silence import Silence
from mooring_agent.adapters.transfer.upload_body import PIECE_BYTES, TURN_BYTES, UploadBody


class BytesBody(UploadBody):
    """The body of an upload that is in memory; `data` must not change as long as a connection may hold pieces of it."""

    def __init__(self, data: bytearray, *, limiter: RateLimiter, payload_signature: str, silence: Silence) -> None:
        super().__init__(len(data), limiter=limiter, payload_signature=payload_signature, silence=silence)
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

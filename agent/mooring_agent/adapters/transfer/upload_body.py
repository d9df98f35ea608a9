"""What all bodies that we send have in common: to botocore they look like files, and they wait for their turn."""

import os
from collections.abc import AsyncIterator
from typing import Final, NoReturn

from mooring_agent.adapters.rate_limit import RateLimiter
from mooring_agent.adapters.transfer.silence import Silence
from mooring_agent.core.errors import MooringError

PIECE_BYTES: Final = 256 * 1024
"""It stays in a core's cache between the copy from the page cache, the checksum and the copy into the socket."""
BUFFER_BYTES: Final = 2 * PIECE_BYTES
"""What a thread reads at a time before it encrypts it: it gives the interpreter's lock away three times for each."""
TURN_BYTES: Final = 4 * PIECE_BYTES
"""After so many others have their turn on the event loop, although the kernel would take more."""


class UploadBody:
    """The body of an upload; whoever derives from it says what its pieces are.

    `payload_signature` is what the signer puts into x-amz-content-sha256 for it. `failure` is why it could not be sent:
    the HTTP library knows only that the connection broke. `sent_whole`: its last piece was handed out.
    """

    def __init__(
        self, size_bytes: int, *, limiter: RateLimiter, payload_signature: str, silence: Silence | None
    ) -> None:
        self.payload_signature = payload_signature
        self.failure: MooringError | None = None
        self.sent_whole = False
        self._size_bytes = size_bytes
        self._limiter = limiter
        self._silence = silence

    def __len__(self) -> int:
        return self._size_bytes

    def read(self, size: int = -1) -> NoReturn:
        raise AssertionError("a body is never read on the event loop")

    def tell(self) -> int:
        return 0

    def seek(self, position: int, whence: int = os.SEEK_SET) -> int:
        """Every sending starts at the first byte: there is nothing to rewind."""
        assert (position, whence) == (0, os.SEEK_SET)
        return 0

    def pieces(self, start: int = 0) -> AsyncIterator[memoryview]:
        """All bytes from `start` on, in order. Before some, but never after the last, others have their turn."""
        raise NotImplementedError

    async def _wait_for_turn(self, size_bytes: int) -> None:
        if not self._limiter.bytes_per_second:
            return
        if self._silence:
            self._silence.allowed()
        await self._limiter.take(size_bytes)
        self._moved()

    def _moved(self) -> None:
        """Something left."""
        if self._silence:
            self._silence.broken()

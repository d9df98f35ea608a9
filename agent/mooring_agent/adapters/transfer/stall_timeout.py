"""The watch over a request in which nothing moves any more."""

import asyncio
from types import TracebackType
from typing import Final

LEAST_BYTES_PER_SECOND: Final = 1024
"""Of one body that arrives. Slower, no checkpoint is restored in a useful time; a server that sends a byte a second is
no better than one that is silent."""


class StallTimeout:
    """Ends what runs inside it with TimeoutError when nothing, or next to nothing, was received or sent for `seconds`.

    aiohttp's own read time-out starts only after the body is sent: without this a stalled upload would wait for ever.
    Movement is noted and no more, thousands of times a second; one timer looks from time to time how long ago it was.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._timeout = asyncio.timeout(None)
        self._loop = asyncio.get_running_loop()
        self._moved_at = self._loop.time()
        self._least_bytes = seconds * LEAST_BYTES_PER_SECOND
        self._received_bytes = 0
        self._watching = True
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> "StallTimeout":
        await self._timeout.__aenter__()
        self.moved()
        self._look()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer:
            self._timer.cancel()
        await self._timeout.__aexit__(kind, error, trace)

    def moved(self) -> None:
        """Something moved."""
        self._moved_at = self._loop.time()
        self._received_bytes = 0
        self._watching = True

    def received(self, size_bytes: int) -> None:
        """So much arrived: it counts as movement once it is as much as the least rate makes of `seconds`."""
        self._received_bytes += size_bytes
        if not self._watching or self._received_bytes >= self._least_bytes:
            self.moved()

    def allowed(self) -> None:
        """We are the ones who wait, on purpose; until `moved`."""
        self._watching = False

    def _look(self) -> None:
        ends_at = self._moved_at + self._seconds if self._watching else self._loop.time() + self._seconds
        if ends_at > self._loop.time():
            self._timer = self._loop.call_at(ends_at, self._look)
        else:
            self._timeout.reschedule(ends_at)

"""Ends a request in which nothing moves any more."""

import asyncio
import time
from typing import Any, Final

LEAST_BYTES_PER_SECOND: Final = 1024
"""The minimum rate of one arriving body. Below it no checkpoint is restored in a useful time: a server that sends one
byte a second is no better than a silent one."""


class StallTimeout:
    """Ends what runs inside it with TimeoutError when nothing, or next to nothing, was received or sent for `seconds`.

    aiohttp's own read time-out starts only after the body is sent, so a stalled upload would wait for ever. Movement
    is reported thousands of times a second, so reporting only notes the time; one timer checks it from time to time.
    One thread at a time may report it, whichever it is.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._timeout = asyncio.timeout(None)
        self._loop = asyncio.get_running_loop()
        # A loop's own clock may stand still while the loop sleeps, and threads read this one.
        self._moved_at = time.monotonic()
        self._least_bytes = seconds * LEAST_BYTES_PER_SECOND
        self._received_bytes = 0
        self._watching = True
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> "StallTimeout":
        await self._timeout.__aenter__()
        self.moved()
        self._look()
        return self

    async def __aexit__(self, *exception: Any) -> None:
        if self._timer:
            self._timer.cancel()
        await self._timeout.__aexit__(*exception)

    def moved(self) -> None:
        """Note that something moved. Ends `allowed`."""
        self._moved_at = time.monotonic()
        self._received_bytes = 0
        self._watching = True

    def received(self, size_bytes: int) -> None:
        """Note that bytes arrived. They count as movement once they reach the minimum rate times `seconds`.

        After `allowed` they count at once.
        """
        self._received_bytes += size_bytes
        if not self._watching or self._received_bytes >= self._least_bytes:
            self.moved()

    def allowed(self) -> None:
        """Suspend the time-out until the next movement: we wait on purpose."""
        self._watching = False

    def _look(self) -> None:
        idle_seconds = time.monotonic() - self._moved_at if self._watching else 0.0
        if idle_seconds < self._seconds:
            self._timer = self._loop.call_later(self._seconds - idle_seconds, self._look)
        else:
            self._timeout.reschedule(self._loop.time())

"""A cap on bytes per second that all uploads of a process share.

Owns the token bucket. The rate may change at any time, also for uploads that already wait: a drain lifts the cap. Only
the bytes of files count, not the requests around them, which add 1 % for files of 100 kB.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final

BURST_SECONDS: Final = 0.1
"""Burst after a pause, in seconds of the rate. Small, because a short measurement would otherwise see no cap."""
SHORTEST_WAIT_SECONDS: Final = 0.001
"""During a shorter wait a clock may not move at all, and the loop would spin."""


async def _wait(changed: asyncio.Event, seconds: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await changed.wait()


class RateLimiter:
    """First come, first served. A rate of 0 means no cap."""

    def __init__(
        self,
        bytes_per_second: int = 0,
        *,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[asyncio.Event, float], Awaitable[None]] = _wait,
    ) -> None:
        """`wait` returns when the event is set or the seconds of `clock` are over."""
        self._rate = bytes_per_second
        self._clock = clock
        self._wait = wait
        self._tokens = 0.0
        self._filled_at = clock()
        self._turn = asyncio.Lock()
        self._changed = asyncio.Event()

    @property
    def bytes_per_second(self) -> int:
        return self._rate

    @property
    def bytes_owed(self) -> float:
        """By how many bytes the takes so far are ahead of the rate."""
        return max(0.0, -self._tokens)

    def set_rate(self, bytes_per_second: int) -> None:
        self._refill()
        self._rate = bytes_per_second
        self._changed.set()

    async def take(self, size_bytes: int) -> None:
        """Wait until `size_bytes` may be sent. A take may exceed the burst; the next one waits for it."""
        if not self._rate:
            return
        async with self._turn:
            while self._rate:
                self._refill()
                if self._tokens >= 0:
                    self._tokens -= size_bytes
                    return
                self._changed.clear()
                await self._wait(self._changed, max(SHORTEST_WAIT_SECONDS, -self._tokens / self._rate))

    def _refill(self) -> None:
        now = self._clock()
        self._tokens = min(self._rate * BURST_SECONDS, self._tokens + (now - self._filled_at) * self._rate)
        self._filled_at = now

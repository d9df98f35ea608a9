"""The watch over a request in which nothing moves any more."""

import asyncio
from types import TracebackType


class Silence:
    """Ends what runs inside it with TimeoutError when nothing was heard or sent for `seconds`.

    aiohttp's own read time-out starts only after the body is sent: without this a stalled upload would wait for ever.
    Movement is noted and no more, thousands of times a second; one timer looks from time to time how long ago it was.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._timeout = asyncio.timeout(None)
        self._loop = asyncio.get_running_loop()
        self._moved_at = self._loop.time()
        self._watching = True
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> "Silence":
        await self._timeout.__aenter__()
        self.broken()
        self._look()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer:
            self._timer.cancel()
        await self._timeout.__aexit__(kind, error, trace)

    def broken(self) -> None:
        """Something moved."""
        self._moved_at = self._loop.time()
        self._watching = True

    def allowed(self) -> None:
        """We are the ones who wait, on purpose; until `broken`."""
        self._watching = False

    def _look(self) -> None:
        ends_at = self._moved_at + self._seconds if self._watching else self._loop.time() + self._seconds
        if ends_at > self._loop.time():
            self._timer = self._loop.call_at(ends_at, self._look)
        else:
            self._timeout.reschedule(ends_at)

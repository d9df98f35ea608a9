"""The watch over a request in which nothing moves any more."""

import asyncio
from types import TracebackType


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

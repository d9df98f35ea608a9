"""Reads again what its owner renews while we run: the store's keys, and the certificates of its CA."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

LOOK_SECONDS: Final = 10.0


class Renewal:
    """Calls `read` in a thread of its own, one call at a time.

    `read` compares what it finds with what it found before, and handles errors. Its argument says whether what it found
    before was refused. A file may lie on a home directory whose server hangs, so requests do not wait for a look.
    """

    def __init__(self, read: Callable[[bool], None], thread_name: str) -> None:
        self._read = read
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=thread_name)
        self._reading: asyncio.Future[None] | None = None
        self._look_at: float | None = None

    def look(self) -> None:
        """Begin to read if the last time is `LOOK_SECONDS` ago. Wait for nothing."""
        now = asyncio.get_running_loop().time()
        if self._look_at is None:
            self._look_at = now + LOOK_SECONDS
        elif now >= self._look_at:
            self._begin(refused=False)

    async def read_now(self) -> None:
        """Read what was refused, or wait for the reading that is under way."""
        await asyncio.shield(self._begin(refused=True))

    def close(self) -> None:
        self._thread.shutdown(wait=False)

    def _begin(self, *, refused: bool) -> "asyncio.Future[None]":
        loop = asyncio.get_running_loop()
        if self._reading is None or self._reading.done():
            self._look_at = loop.time() + LOOK_SECONDS
            self._reading = loop.run_in_executor(self._thread, self._read, refused)
        return self._reading

"""How long a test waits for a task of its own process: a bound on a hang, which judges no speed."""

import asyncio
from collections.abc import Callable
from typing import Final

LIMIT_SECONDS: Final = 60.0


async def until(holds: Callable[[], bool]) -> None:
    """Let other tasks run until `holds`. Raises TimeoutError."""
    async with asyncio.timeout(LIMIT_SECONDS):
        while not holds():  # noqa: ASYNC110 - another task makes it true
            await asyncio.sleep(0.001)

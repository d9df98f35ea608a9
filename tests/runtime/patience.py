"""How a test waits for a task of its own process."""

import asyncio
from collections.abc import Callable

from tests.harness.bounds import HANG_SECONDS


async def until(holds: Callable[[], bool]) -> None:
    """Let other tasks run until `holds`. Raises TimeoutError."""
    async with asyncio.timeout(HANG_SECONDS):
        while not holds():  # noqa: ASYNC110 - another task makes it true
            await asyncio.sleep(0.001)

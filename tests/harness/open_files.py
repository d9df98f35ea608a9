"""What this process holds open, of which a leak would be seen."""

import asyncio
import contextlib
from pathlib import Path

from tests.harness.bounds import HANG_SECONDS


def open_files() -> list[Path]:
    """A file as often as it is open."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # other threads close theirs meanwhile
            found.append(link.readlink())
    return found


async def until_open(path: Path, count: int) -> None:
    """Until this process has the file open so often."""
    async with asyncio.timeout(HANG_SECONDS):
        while open_files().count(path) != count:  # noqa: ASYNC110 - a thread that closes tells nobody
            await asyncio.sleep(0.005)

"""The same work for many items, a bounded number at a time; the first failure cancels the rest and is raised alone."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

_Item = TypeVar("_Item")


def at_once(sizes_bytes: Iterable[int], *, most: int, together_bytes: int) -> int:
    """How many things to have in memory at a time: `most`, and fewer if so many of the largest are too much."""
    return max(1, min(most, together_bytes // max(1, max(sizes_bytes, default=1))))


async def for_each(items: Iterable[_Item], work: Callable[[_Item], Awaitable[None]], *, at_once: int) -> None:
    """Await `work(item)` for every item, in order of start."""
    waiting = iter(items)

    async def take() -> None:
        for item in waiting:
            await work(item)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(at_once):
                group.create_task(take())
    except ExceptionGroup as failed:
        # Not `except*`: until Python 3.11.4 what is raised there comes out as a group again.
        first = failed.exceptions[0]
        raise first from first.__cause__

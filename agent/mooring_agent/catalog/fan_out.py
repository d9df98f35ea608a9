"""The same work for many items, a bounded number at a time; the first failure cancels the rest and is raised alone."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

_Item = TypeVar("_Item")


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

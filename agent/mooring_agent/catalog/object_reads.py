"""Reads small objects and decodes them, and runs many such reads with a bound on concurrency.

An object that cannot be decoded is read again, over a new connection, before it is called damaged: a byte that flips
on the way is not damage.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

from mooring_agent.core.errors import ErrorKind, StoreError
from mooring_agent.ports import ObjectStore

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


_Value = TypeVar("_Value")


async def read_object(
    store: ObjectStore, key: str, decode: Callable[[bytes, str], _Value], *, limit_bytes: int
) -> _Value:
    """What `decode(body, key)` returns, which raises StoreError(CHECKPOINT_CORRUPT); other errors are the store's."""
    try:
        return decode(await get_whole(store, key, limit_bytes=limit_bytes), key)
    except StoreError as error:
        if error.kind is not ErrorKind.CHECKPOINT_CORRUPT:
            raise
    return decode(await get_whole(store, key, limit_bytes=limit_bytes, fresh=True), key)


async def get_whole(store: ObjectStore, key: str, *, limit_bytes: int, fresh: bool = False) -> bytes:
    """All of an object. CHECKPOINT_CORRUPT if it is larger than it may be."""
    try:
        return await store.get(key, limit_bytes=limit_bytes, fresh=fresh)
    except StoreError as error:
        if error.kind is not ErrorKind.REQUEST_REFUSED:
            raise
        # A store has other reasons to refuse, which say nothing of the object.
        size_bytes = (await store.head(key)).size_bytes
        if size_bytes <= limit_bytes:
            raise
        raise StoreError(
            ErrorKind.CHECKPOINT_CORRUPT,
            f"{key} has {size_bytes} bytes, it may have {limit_bytes}",
            hint="restore falls back to the next older checkpoint; `mooring verify` shows all that is damaged",
        ) from error

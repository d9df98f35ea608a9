"""Reads small objects and decodes them, and runs many such reads with a bound on concurrency.

An object that cannot be decoded is read again over a new connection before it counts as damaged, because a byte may
have flipped on the way.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Final, TypeVar

from keepstep_agent.core.errors import ErrorKind, KeepstepError, StoreError, checkpoint_corrupt
from keepstep_agent.ports import StoreReader, StoreWriter

# The answers that mean "this object is not what was written", as opposed to "the store cannot say now".
DAMAGE: Final = frozenset({ErrorKind.CHECKPOINT_CORRUPT, ErrorKind.NOT_FOUND})
READ_REFUSALS: Final = frozenset({ErrorKind.ACCESS_DENIED, ErrorKind.REQUEST_REFUSED})
"""What a store answers for one object, though it gives others: archived, of another key, or another owner's."""
UNREADABLE: Final = DAMAGE | {ErrorKind.FORMAT_UNKNOWN, ErrorKind.REQUEST_REFUSED}
"""Why a prune cannot judge by an object, and goes on: it is damaged, of a newer format, or archived. ACCESS_DENIED is
none: keys that are replaced at this moment get it for every object."""

_Item = TypeVar("_Item")


def at_once(sizes_bytes: Iterable[int], *, most: int, together_bytes: int) -> int:
    """Return how many things to hold in memory at a time.

    That is `most`, or as many of the largest as fit into `together_bytes` if that is fewer; at least one.
    """
    return max(1, min(most, together_bytes // max(1, max(sizes_bytes, default=1))))


async def for_each(items: Iterable[_Item], work: Callable[[_Item], Awaitable[None]], *, at_once: int) -> None:
    """Await `work(item)` for every item, started in order, `at_once` at a time. Raises the first failure."""
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


async def delete_unlocked(store: StoreWriter, keys: Iterable[str], *, at_once: int) -> tuple[str, ...]:
    """Delete objects, and return the keys of those that the store's own retention protects."""
    locked: list[str] = []

    async def delete(key: str) -> None:
        try:
            await store.delete(key)
        except StoreError as error:
            if error.kind is not ErrorKind.OBJECT_LOCKED:
                raise
            locked.append(key)

    await for_each(keys, delete, at_once=at_once)
    return tuple(locked)


_Value = TypeVar("_Value")


async def read_object(
    store: StoreReader, key: str, decode: Callable[[bytes, str], _Value], *, limit_bytes: int
) -> _Value:
    """Return `decode(body, key)`, which raises StoreError(CHECKPOINT_CORRUPT). Other errors are the store's."""
    try:
        return decode(await get_whole(store, key, limit_bytes=limit_bytes), key)
    except StoreError as error:
        if error.kind is not ErrorKind.CHECKPOINT_CORRUPT:
            raise
    return decode(await get_whole(store, key, limit_bytes=limit_bytes, fresh=True), key)


async def if_there(reading: Awaitable[_Value]) -> _Value | None:
    """Return what is read; None if there is no such object."""
    try:
        return await reading
    except StoreError as error:
        if error.kind is ErrorKind.NOT_FOUND:
            return None
        raise


async def get_whole(store: StoreReader, key: str, *, limit_bytes: int, fresh: bool = False) -> bytes:
    """Return all of an object. Raises CHECKPOINT_CORRUPT if it is larger than `limit_bytes`."""
    try:
        return await store.get(key, limit_bytes=limit_bytes, fresh=fresh)
    except StoreError as error:
        if error.kind is not ErrorKind.REQUEST_REFUSED:
            raise
        # A store may refuse for other reasons, which say nothing about the object.
        size_bytes = (await store.head(key)).size_bytes
        if size_bytes <= limit_bytes:
            raise
        raise checkpoint_corrupt(f"{key} has {size_bytes} bytes, more than {limit_bytes}") from error


def problem_of(key: str, error: KeepstepError) -> str:
    """Return what is wrong with an object, by the error of reading it."""
    return "is missing" if error.kind is ErrorKind.NOT_FOUND else str(error).removeprefix(f"{key} ")

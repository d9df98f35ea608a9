"""Small objects, whole and decoded. What cannot be decoded is read again before anybody calls it damaged.

A byte that flips on the way is not damage: the second read goes over a connection of its own, past whatever flipped it.
"""

from collections.abc import Callable
from typing import TypeVar

from mooring_agent.core.errors import ErrorKind, StoreError
from mooring_agent.ports import ObjectStore

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

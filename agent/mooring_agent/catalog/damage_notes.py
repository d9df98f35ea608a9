"""Notes at the destination of saves that a restore found damaged, so that prune deletes nothing because of them.

A note is a help and no condition: whoever only may read does without, and a note that is wrong only keeps more.
"""

import structlog

from mooring_agent.core.errors import ErrorKind, StoreError
from mooring_agent.core.object_layout import damage_key
from mooring_agent.ports import ObjectStore

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


async def note_damage(store: ObjectStore, save: str, reason: str) -> None:
    try:
        await store.put(damage_key(save), f"{reason}\n".encode(errors="backslashreplace"))
    except StoreError as error:
        _log.warning("damage_not_noted", save=save, error=str(error))


async def clear_damage(store: ObjectStore, save: str) -> None:
    """Every byte of the save was just found good: what was noted of it is over."""
    key = damage_key(save)
    try:
        # Few saves have a note, and fewer readers may delete.
        await store.head(key)
        await store.delete(key)
    except StoreError as error:
        if error.kind is not ErrorKind.NOT_FOUND:
            _log.warning("damage_note_stays", save=save, error=str(error))
        return
    _log.info("damage_note_removed", save=save)

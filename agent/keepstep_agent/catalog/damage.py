"""Notes of the saves that a restore has found damaged: one small object for each, which says what is wrong.

A note is a hint, not a condition: a reader without write access does without it, and a wrong note only keeps more.
"""

from typing import Final

import structlog

from keepstep_agent.catalog.object_reads import DAMAGE, REFUSALS, get_whole, if_there
from keepstep_agent.core.errors import StoreError
from keepstep_agent.core.stored.object_layout import DAMAGED_PREFIX, damage_key
from keepstep_agent.ports import StoreReader, StoreWriter

_NOTE_BYTES: Final = 64 * 1024

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


async def note_damage(store: StoreWriter, save: str, reason: str) -> None:
    try:
        await store.put(damage_key(save), f"{reason}\n".encode(errors="backslashreplace"))
    except StoreError as error:
        _log.warning("damage.not_noted", save=save, error=str(error))


async def clear_damage(store: StoreWriter, save: str) -> None:
    """Remove a save's note of damage, because every byte of it was just found good."""
    key = damage_key(save)
    try:
        # The HEAD comes first: few saves have a note, and fewer readers may delete.
        if await if_there(store.head(key)):
            await store.delete(key)
            _log.info("damage.note_removed", save=save)
    except StoreError as error:
        _log.warning("damage.note_stays", save=save, error=str(error))


async def damaged_saves(store: StoreReader, run: str = "") -> frozenset[str]:
    """Return the ids of the saves that have a note. `run` is the prefix of their run if the store holds many."""
    return frozenset([one.key.removeprefix(run + DAMAGED_PREFIX) async for one in store.list(run + DAMAGED_PREFIX)])


async def read_damage(store: StoreReader, save: str) -> str:
    """Return what a save's note says is wrong; empty if it has none, or one that cannot be read."""
    try:
        note = await if_there(get_whole(store, damage_key(save), limit_bytes=_NOTE_BYTES))
    except StoreError as error:
        if error.kind not in (*DAMAGE, *REFUSALS):
            raise
        note = None
    return (note or b"").decode(errors="replace").strip()

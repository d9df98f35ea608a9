"""Notes of the saves that a restore did not take: one small object for each, which says why.

It was damaged, or programs that resumed from it failed again and again. A note of damage is a hint, not a condition: a
reader without write access does without it, and a wrong note only keeps more.
"""

from typing import Final

import structlog

from keepstep_agent.catalog.object_reads import DAMAGE, REFUSALS, get_whole, if_there
from keepstep_agent.core.errors import StoreError
from keepstep_agent.core.stored.object_layout import DAMAGED_PREFIX, damage_key, parse_note_key, passed_over_key
from keepstep_agent.ports import StoreReader, StoreWriter

_NOTE_BYTES: Final = 64 * 1024

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


async def note_damage(store: StoreWriter, save: str, reason: str) -> None:
    await _note(store, damage_key(save), reason)


async def note_passed_over(store: StoreWriter, save: str, reason: str) -> None:
    await _note(store, passed_over_key(save), reason)


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
    return frozenset([save for save, _ in await _notes(store, run)])


async def passed_over_saves(store: StoreReader) -> frozenset[str]:
    """Return the ids of the saves that a restore has passed over."""
    return frozenset([save for save, passed_over in await _notes(store, "") if passed_over])


async def read_damage(store: StoreReader, save: str) -> str:
    """Return what a save's notes say is wrong; empty if it has none, or one that cannot be read."""
    notes: list[str] = []
    for key in (damage_key(save), passed_over_key(save)):
        try:
            note = await if_there(get_whole(store, key, limit_bytes=_NOTE_BYTES))
        except StoreError as error:
            if error.kind not in (*DAMAGE, *REFUSALS):
                raise
            note = None
        notes.append((note or b"").decode(errors="replace").strip())
    return "; ".join(filter(None, notes))


async def _note(store: StoreWriter, key: str, reason: str) -> None:
    try:
        await store.put(key, f"{reason}\n".encode(errors="backslashreplace"))
    except StoreError as error:
        _log.warning("damage.not_noted", note=key, error=str(error))


async def _notes(store: StoreReader, run: str) -> list[tuple[str, bool]]:
    return [parse_note_key(one.key.removeprefix(run)) async for one in store.list(run + DAMAGED_PREFIX)]

"""Notes of the saves that a restore did not take: one small object for each, which says why.

It was damaged, or programs that resumed from it failed again and again. A note of damage is a hint, not a condition: a
reader without write access does without it, and a wrong note only keeps more. What was passed over is offered again if
nothing else is left: then the program is at fault, or all is lost anyway.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Final

import structlog

from keepstep_agent.catalog.ledger import decode_object, newest_objects
from keepstep_agent.catalog.object_reads import DAMAGE, READ_REFUSALS, for_each, get_whole, if_there, read_object
from keepstep_agent.core.errors import StoreError
from keepstep_agent.core.limits import LEDGER_BYTES, LEDGER_OBJECTS_BYTES
from keepstep_agent.core.mirror.base import series_of
from keepstep_agent.core.policies.restore_choice import CommittedSave, failed_in_a_row
from keepstep_agent.core.stored.ledger import AgentLife, joined_lives
from keepstep_agent.core.stored.object_layout import DAMAGED_PREFIX, damage_key, parse_note_key, passed_over_key
from keepstep_agent.ports import StoreReader, StoreWriter

_NOTE_BYTES: Final = 64 * 1024
_READ_AT_ONCE: Final = 8
_MOST_OBJECTS: Final = 128
_LEDGER_SECONDS: Final = 30.0
_HINT: Final = "it stays, and --fall-back-after 0 takes it again"

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


async def read_damage(store: StoreReader, save: str) -> str:
    """Return what a save's notes say is wrong; empty if it has none, or one that cannot be read."""
    notes: list[str] = []
    for key in (damage_key(save), passed_over_key(save)):
        try:
            note = await if_there(get_whole(store, key, limit_bytes=_NOTE_BYTES))
        except StoreError as error:
            if error.kind not in (*DAMAGE, *READ_REFUSALS):
                raise
            note = None
        notes.append((note or b"").decode(errors="replace").strip())
    return "; ".join(filter(None, notes))


async def passed_over(
    store: StoreWriter, snapshots: Mapping[str, Sequence[CommittedSave]], *, node_rank: int, after: int
) -> Mapping[str, str]:
    """Return why snapshots are passed over, by save; none of a series of which all would be.

    Those that have a note, and that of this node with which its last `after` starts failed early. A store that does not
    tell is no reason to restore nothing: then none is.
    """
    if not after or not snapshots:
        return {}
    try:
        async with asyncio.timeout(_LEDGER_SECONDS):
            noted = frozenset([save for save, is_passed_over in await _notes(store, "") if is_passed_over])
            count, save = await _failed_in_a_row(store, node_rank)
    except (StoreError, TimeoutError) as error:
        _log.warning("restore.passes_nothing_over", error=str(error) or "the store did not answer in time")
        return {}
    reasons = dict.fromkeys(noted, f"programs that resumed from it have failed within a minute; {_HINT}")
    own = {one.save for one in snapshots.get(series_of(node_rank), ())}
    is_new = count >= after and save in own - noted
    if is_new:
        reasons[save] = f"{count} starts in a row that resumed from it have failed within a minute; {_HINT}"
    skipped: dict[str, str] = {}
    for series, found in snapshots.items():
        saves = [one.save for one in found]
        if reasons.keys().isdisjoint(saves):
            continue
        if reasons.keys() >= set(saves):
            _log.warning("restore.nothing_older", series=series, hint="see why the program fails: no snapshot is older")
        else:
            skipped |= {save: reasons[save] for save in saves if save in reasons}
    if is_new and save in skipped:
        _log.warning("restore.passed_over", save=save, starts=count)
        await note_passed_over(store, save, reasons[save])
    return skipped


async def _failed_in_a_row(store: StoreReader, node_rank: int) -> tuple[int, str]:
    """Read the ledger's objects, newest first, until a start that did not fail early is found."""
    keys, _ = await newest_objects(store, "", most_bytes=LEDGER_OBJECTS_BYTES)
    lives: list[AgentLife] = []
    count, save = 0, ""

    async def read(key: str) -> None:
        try:
            lives.extend(await if_there(read_object(store, key, decode_object, limit_bytes=LEDGER_BYTES)) or ())
        except StoreError as error:
            if error.kind not in (*DAMAGE, *READ_REFUSALS):
                raise

    for number in range(0, min(len(keys), _MOST_OBJECTS), _READ_AT_ONCE):
        await for_each(keys[number : number + _READ_AT_ONCE], read, at_once=_READ_AT_ONCE)
        count, save, is_all = failed_in_a_row(joined_lives(lives), node_rank)
        if is_all:
            break
    return count, save


async def _note(store: StoreWriter, key: str, reason: str) -> None:
    try:
        await store.put(key, f"{reason}\n".encode(errors="backslashreplace"))
    except StoreError as error:
        _log.warning("damage.not_noted", note=key, error=str(error))


async def _notes(store: StoreReader, run: str) -> list[tuple[str, bool]]:
    return [parse_note_key(one.key.removeprefix(run)) async for one in store.list(run + DAMAGED_PREFIX)]

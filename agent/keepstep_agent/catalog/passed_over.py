"""Finds the snapshots that a restore passes over: programs that resumed from them failed early, again and again.

The run's ledger tells it. What was passed over stays at the destination, with a note that `ls` shows and prune counts.
It is offered again if nothing else is left: then the program is at fault, or all is lost anyway.
"""

from collections.abc import Iterable, Mapping
from typing import Final

import structlog

from keepstep_agent.catalog.damage import note_passed_over, passed_over_saves
from keepstep_agent.catalog.ledger import decode_object, newest_objects
from keepstep_agent.catalog.object_reads import DAMAGE, REFUSALS, for_each, if_there, read_object
from keepstep_agent.core.errors import StoreError
from keepstep_agent.core.limits import LEDGER_BYTES, LEDGER_OBJECTS_BYTES
from keepstep_agent.core.policies.restore_choice import CommittedSave, failed_in_a_row
from keepstep_agent.core.stored.ledger import AgentLife, joined_lives
from keepstep_agent.ports import StoreReader, StoreWriter

_READ_AT_ONCE: Final = 8
_MOST_OBJECTS: Final = 128
_HINT: Final = "it stays, and --fall-back-after 0 takes it again"

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


async def passed_over(
    store: StoreWriter, snapshots: Iterable[CommittedSave], *, node_rank: int, after: int
) -> Mapping[str, str]:
    """Return why snapshots of this node are passed over, by save; empty if all of them would be.

    After `after` starts in a row that failed early; 0: none is.
    """
    saves = {one.save for one in snapshots}
    if not after or not saves:
        return {}
    noted = await passed_over_saves(store)
    count, had = await _failed_in_a_row(store, node_rank, noted)
    reasons = dict.fromkeys(noted & saves, f"programs that resumed from it have failed within a minute; {_HINT}")
    failed = f"{count} starts in a row that resumed from it have failed within a minute; {_HINT}"
    new = dict.fromkeys(had & saves if count >= after else (), failed)
    if saves <= reasons.keys() | new.keys():
        if new or reasons:
            _log.warning("restore.nothing_older", starts=count, hint="see why the program fails: no snapshot is older")
        return {}
    for save, reason in new.items():
        _log.warning("restore.passed_over", save=save, starts=count)
        await note_passed_over(store, save, reason)
    return reasons | new


async def _failed_in_a_row(store: StoreReader, node_rank: int, noted: frozenset[str]) -> tuple[int, frozenset[str]]:
    """Read the ledger's objects, newest first, until a start that did not fail early is found."""
    keys, _ = await newest_objects(store, "", most_bytes=LEDGER_OBJECTS_BYTES)
    lives: list[AgentLife] = []
    count, had = 0, frozenset[str]()

    async def read(key: str) -> None:
        try:
            lives.extend(await if_there(read_object(store, key, decode_object, limit_bytes=LEDGER_BYTES)) or ())
        except StoreError as error:
            if error.kind not in (*DAMAGE, *REFUSALS):
                raise

    for number in range(0, min(len(keys), _MOST_OBJECTS), _READ_AT_ONCE):
        await for_each(keys[number : number + _READ_AT_ONCE], read, at_once=_READ_AT_ONCE)
        count, had, is_over = failed_in_a_row(joined_lives(lives), node_rank, noted)
        if is_over:
            break
    return count, had

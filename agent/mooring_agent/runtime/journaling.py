"""From the journal to a state and back: replay at the start, compaction so that it stays short."""

from collections.abc import Sequence

import structlog

from mooring_agent.core.errors import ErrorKind, VolumeError
from mooring_agent.core.event_codec import decode_event, encode_event
from mooring_agent.core.events import (
    Announced,
    Committed,
    DurableEvent,
    Exited,
    RankRegistered,
    Released,
    Staged,
    TerminationNoticed,
    save_of,
)
from mooring_agent.core.reducer import step
from mooring_agent.core.settings import Settings
from mooring_agent.core.state import State
from mooring_agent.ports import Journal, StagingArea
from mooring_agent.runtime.staging import rescan

# Of a checkpoint that is over, this is what status, idempotent announcements and retention still need.
_ENDED_NEEDS = (Announced, Staged, Committed, Released)

log = structlog.get_logger("mooring.journal")


def recover(settings: Settings, journal: Journal, staging: StagingArea) -> tuple[State, Sequence[bytes]]:
    """The state as the journal and the staged directories tell it, and the records that a full volume did not take.

    A journal of which anything cannot be read or replayed, as of a later version, is set aside: what is pinned
    describes itself, and half a story would not replay. Otherwise it is compacted, if there is room. Blocks. Raises
    VolumeError when the volume cannot be used. A full one can: what is staged on it waits to be sent.
    """
    records = list(journal.replay())
    try:
        state = _replay(settings, records)
    except Exception:
        log.exception("journal.unreadable", action="set aside; the staged directories are rescanned")
        journal.set_aside()
        state = State(settings=settings)
    found = []
    for event in rescan(staging, state):
        step(state, event)
        found.append(encode_event(event))
    kept = len(records)
    unjournaled = found
    try:
        if found:
            journal.append(found)
        unjournaled = []
        kept = compact(state, journal)
    except VolumeError as error:
        if error.kind is not ErrorKind.DISK_FULL:
            raise
        log.error("journal.no_room", error=str(error), hint=error.hint, unjournaled=len(unjournaled))
    log.info("journal.replayed", records=len(records), kept=kept, found=len(found))
    return state, unjournaled


def compact(state: State, journal: Journal) -> int:
    """Drop the records that `state` no longer needs; how many are left. Blocks; `state` must not change meanwhile."""
    events = [decode_event(record) for record in journal.replay()]
    notices_from = _after_last_exit(events)
    kept = [
        event
        for position, event in enumerate(events)
        if _is_needed(state, event, is_current_life=position >= notices_from)
    ]
    if len(kept) < len(events):
        journal.rewrite([encode_event(event) for event in kept])
    return len(kept)


def _after_last_exit(events: Sequence[DurableEvent]) -> int:
    """Where the records of this life begin: an orderly exit has used up the notices before it."""
    return max((position + 1 for position, event in enumerate(events) if isinstance(event, Exited)), default=0)


def _replay(settings: Settings, records: Sequence[bytes]) -> State:
    state = State(settings=settings)
    for record in records:
        step(state, decode_event(record))
    return state


def _is_needed(state: State, event: DurableEvent, *, is_current_life: bool) -> bool:
    save = save_of(event)
    if save is None:
        if isinstance(event, RankRegistered):
            return is_current_life and state.ranks.get(event.local_rank) == event.rank
        return is_current_life and isinstance(event, TerminationNoticed) and state.termination.noticed
    checkpoint = state.checkpoints.get(save)
    if checkpoint is None:
        return False
    if checkpoint.settled:
        return checkpoint is state.newest_committed() and isinstance(event, _ENDED_NEEDS)
    return True

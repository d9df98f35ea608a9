"""Restores the state at the start, by replaying the journal and rescanning the pins, and keeps the journal short."""

from collections.abc import Iterator, Mapping, Sequence

import structlog

from keepstep_agent.core.agent.announcements import check_announcement
from keepstep_agent.core.agent.checkpoint import RankContribution
from keepstep_agent.core.agent.events import (
    Announced,
    Committed,
    DurableEvent,
    Exited,
    Failed,
    NewsDue,
    NewsTaken,
    RankRegistered,
    Released,
    Shed,
    Staged,
    TerminationNoticed,
)
from keepstep_agent.core.agent.reducer import step
from keepstep_agent.core.agent.state import State
from keepstep_agent.core.agent.work import Operation, WorkId
from keepstep_agent.core.errors import ErrorKind, RequestError, VolumeError
from keepstep_agent.core.model import StagedFile
from keepstep_agent.core.settings.values import Settings
from keepstep_agent.core.stored.packs_and_parts import PACK_BYTES
from keepstep_agent.ports import Journal, StagedDescriptor, StagingArea, save_of_pin
from keepstep_agent.runtime.engine.event_codec import UnknownRecordError, decode_event, encode_event

# The events of an ended checkpoint that status, idempotent announcements and retention still need.
_ENDED_NEEDS = (Announced, Staged, Committed, Released)

log = structlog.get_logger("keepstep.journal")


def recover(settings: Settings, journal: Journal, staging: StagingArea) -> tuple[State, Sequence[bytes]]:
    """Rebuild the state from the journal and the staged directories; also return what a full volume could not journal.

    If any record cannot be read or replayed, such as one of a later version, the whole journal is set aside: a part of
    it would not replay, and staged directories describe themselves. Otherwise it is compacted, if there is room.
    Blocks. Raises VolumeError when the volume cannot be used. A full volume can be: what is staged on it can be sent.
    """
    records = list(journal.replay())
    state = State(settings=settings)
    try:
        for record in records:
            step(state, decode_event(record))
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
    """Drop the records that `state` does not need; return how many are left.

    Blocks; `state` must not change meanwhile.
    """
    events = [decode_event(record) for record in journal.replay()]
    # Notices before an orderly exit are void.
    life_begins = max((position for position, event in enumerate(events) if isinstance(event, Exited)), default=0)
    kept = [
        event
        for position, event in enumerate(events)
        if _is_needed(state, event, is_current_life=position >= life_begins)
    ]
    if len(kept) < len(events):
        journal.rewrite([encode_event(event) for event in kept])
    return len(kept)


def _is_needed(state: State, event: DurableEvent, *, is_current_life: bool) -> bool:
    save = save_of(event)
    if isinstance(event, NewsDue | NewsTaken):
        return save is not None and state.untold_news.has(save)
    if save is None:
        if isinstance(event, RankRegistered):
            return is_current_life and state.ranks.get(event.local_rank) == event.rank
        if isinstance(event, Exited):
            # Without it, an earlier life's just-in-time save would pass for the one that this life's trainers owe.
            return is_current_life and bool(state.just_in_time)
        return is_current_life and isinstance(event, TerminationNoticed) and state.termination.noticed
    checkpoint = state.checkpoints.get(save)
    if checkpoint is None:
        return False
    if checkpoint.settled:
        return state.is_newest(checkpoint) and isinstance(event, _ENDED_NEEDS)
    return True


def save_of(event: DurableEvent) -> str | None:
    """Return the save that an event belongs to; None for events of the agent as a whole."""
    match event:
        case Announced():
            return event.info.save
        case Shed() | Failed() | NewsTaken():
            return event.save
        case NewsDue():
            return event.news.info.save
        case TerminationNoticed() | RankRegistered() | Exited():
            return None
        case _:
            return event.work.save


def rescan(staging: StagingArea, state: State) -> Iterator[DurableEvent]:
    """Yield the events behind pins that `state` does not know: after a damaged journal, or on an earlier pod's volume.

    The caller applies each before it asks for the next. They come in the order of announcement, which decides which
    checkpoint is the newest. Trainers can write descriptors, so each one is checked as an announcement is.
    """
    for announcements, described, files in sorted(_described(staging, state), key=lambda found: _order(found[0])):
        first = announcements[0]
        try:
            for announcement in announcements:
                if announcement.rank not in _shares(state, first):
                    check_announcement(state, announcement)
                    log.info("staging.found_again", save=announcement.info.save, rank=announcement.rank)
                    yield announcement
        except RequestError as error:
            log.warning("staging.refused", save=first.info.save, rank=first.rank, error=str(error), hint=error.hint)
            continue
        if not _shares(state, first)[first.rank].staged:
            yield Staged(
                at=first.at,
                work=WorkId(Operation.STAGE, first.info.save, first.rank),
                files=files,
                part_size_bytes=described.part_size_bytes or state.settings.transfer.part_size_bytes,
                pack_size_bytes=min(described.pack_size_bytes, PACK_BYTES),
            )


def _shares(state: State, announced: Announced) -> Mapping[int, RankContribution]:
    checkpoint = state.checkpoints.get(announced.info.save)
    # A save whose staging failed may have been announced again, with nothing but the descriptor written.
    return checkpoint.contributions if checkpoint and not checkpoint.begins_anew else {}


def _described(
    staging: StagingArea, state: State
) -> Iterator[tuple[Sequence[Announced], StagedDescriptor, tuple[StagedFile, ...]]]:
    """Yield the announcements, the descriptor and the files of everything that is staged.

    Drops the pins of snapshots that `state` does not know: their files are still where the program wrote them.
    """
    for described, files in staging.scan():
        if not described.announcements:
            save = save_of_pin(files[0].pin)
            if save not in state.checkpoints:
                log.info("staging.snapshot_dropped", save=save)
                staging.release(save)
            continue
        try:
            announcements = [decode_event(record.encode()) for record in described.announcements]
        except UnknownRecordError as error:
            log.warning("staging.unknown_descriptor", error=str(error))
            continue
        announced = [event for event in announcements if isinstance(event, Announced)]
        if not announced or len(announced) < len(announcements):
            log.warning("staging.unknown_descriptor", error=f"{len(announced)} of {announcements} are announcements")
            continue
        yield announced, described, files


def _order(announcements: Sequence[Announced]) -> tuple[float, int, int]:
    """Sort key: a checkpoint is as old as its first announcement."""
    first = min(announcements, key=lambda announcement: announcement.at)
    return first.at, first.info.step, first.rank

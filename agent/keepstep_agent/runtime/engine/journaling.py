"""Restores the state at the start, by replaying the journal and rescanning the pins, and keeps the journal short."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Final, Protocol

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
from keepstep_agent.core.file_lists import StagedFiles
from keepstep_agent.core.policies.repeated_deaths import JOURNAL, MEMORY_HINT, Suspect
from keepstep_agent.core.settings.values import Settings
from keepstep_agent.core.stored.packs_and_parts import PACK_BYTES
from keepstep_agent.ports import Journal, StagedDescriptor, StagingArea, save_of_pin
from keepstep_agent.runtime.engine.event_codec import (
    UnknownRecordError,
    decode_announcement,
    decode_event,
    encode_event,
    is_large,
    save_of_record,
)

# The events of an ended checkpoint that status, idempotent announcements and retention still need.
_ENDED_NEEDS = (Announced, Staged, Committed, Released)

log = structlog.get_logger("keepstep.journal")


class StartNote(Protocol):
    """Notes what a start reads, so that the next one leaves out what killed it again and again."""

    @property
    def suspects(self) -> Mapping[str, Suspect]: ...

    @property
    def left_out(self) -> Collection[str]:
        """The saves that may not be read now, and JOURNAL if the journal may not."""

    def reads(self, work: str, title: str = "") -> None:
        """Note that a save or the journal is about to be read."""


class _NothingNoted:
    suspects: Mapping[str, Suspect] = {}
    left_out: Collection[str] = ()

    def reads(self, work: str, title: str = "") -> None: ...


_NOTHING_NOTED: Final = _NothingNoted()


def recover(
    settings: Settings, journal: Journal, staging: StagingArea, note: StartNote = _NOTHING_NOTED
) -> tuple[State, Sequence[bytes]]:
    """Rebuild the state from the journal and the staged directories; also return what a full volume could not journal.

    If any record cannot be read or replayed, such as one of a later version, the whole journal is moved aside: a part
    of it would not replay, and staged directories describe themselves. Otherwise it is compacted, if there is room.
    What `note` does not let us read stays where it is.
    Blocks. Raises VolumeError when the volume cannot be used. A full volume can be: what is staged on it can be sent.
    """
    records = 0
    state = State(settings=settings)
    if JOURNAL in note.left_out:
        log.error("journal.kills", action="moved aside; the staged directories are rescanned", hint=MEMORY_HINT)
        journal.move_aside()
    note.reads(JOURNAL)
    for record in journal.replay():
        records += 1
        try:
            _apply(state, record, note)
        except Exception:
            log.exception("journal.unreadable", action="moved aside; the staged directories are rescanned")
            journal.move_aside()
            state = State(settings=settings)
            break
    for save in note.left_out:
        if save != JOURNAL:
            # Only its pins tell of it.
            state.leave_unread(save)
    found = []
    for event in rescan(staging, state, partial(_may_read, note)):
        step(state, event)
        found.append(encode_event(event))
    # What follows is of no single save.
    note.reads(JOURNAL)
    kept = records
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
    log.info("journal.replayed", records=records, kept=kept, found=len(found))
    return state, unjournaled


def compact(state: State, journal: Journal) -> int:
    """Drop the records that `state` does not need; return how many are left.

    Blocks; `state` must not change meanwhile.
    """
    # By position: those that are needed at most in the current life, and those that are needed in none.
    current_alone, unneeded = [], []
    life_begins = count = 0
    for position, record in enumerate(journal.replay()):
        count += 1
        if state.unread and save_of_record(record)[0] in state.unread:
            # Of a save that is set aside nothing is decoded, and everything is kept.
            continue
        event = decode_event(record)
        if isinstance(event, Exited):
            # Notices before an orderly exit are void.
            life_begins = position
        if not _is_needed(state, event, is_current_life=True):
            unneeded.append(position)
        elif not _is_needed(state, event, is_current_life=False):
            current_alone.append(position)
    unneeded += (position for position in current_alone if position < life_begins)
    if unneeded:
        journal.drop(unneeded)
    return count - len(unneeded)


def recall(settings: Settings, journal: Journal, staging: StagingArea, save: str) -> tuple[DurableEvent, ...]:
    """Return all events of a save that was not read at the start. Those that only its pins tell are journaled.

    If one of its records cannot be read or replayed, all of them are dropped, and its pins count.
    Blocks. Raises VolumeError.
    """
    positions, events = [], []
    state = State(settings=settings)
    try:
        for position, record in enumerate(journal.replay()):
            if save_of_record(record)[0] == save:
                positions.append(position)
                events.append(decode_event(record))
                step(state, events[-1])
    except VolumeError:
        # The records may be whole.
        raise
    except Exception:
        log.exception("journal.unreadable", save=save, action="its records are dropped; its pins are rescanned")
        state, events = State(settings=settings), []
        positions = [at for at, record in enumerate(journal.replay()) if save_of_record(record)[0] == save]
        journal.drop(positions)
    if not events:
        for event in rescan(staging, state, lambda found: found == save):
            step(state, event)
            events.append(event)
        if events:
            journal.append([encode_event(event) for event in events])
    return tuple(events)


def _apply(state: State, record: bytes, note: StartNote) -> None:
    """Apply a record, unless it is of a save that is left out. Only a large one is noted: it alone may be too much."""
    large = is_large(record)
    if large or note.left_out:
        save, title = save_of_record(record)
        if save in note.left_out:
            state.leave_unread(save)
            return
        if large:
            note.reads(save, title)
    step(state, decode_event(record))
    if large:
        note.reads(JOURNAL)


def _may_read(note: StartNote, save: str) -> bool:
    if save in note.left_out:
        return False
    note.reads(save)
    return True


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


def rescan(
    staging: StagingArea, state: State, may_read: Callable[[str], bool] = lambda _: True
) -> Iterator[DurableEvent]:
    """Yield the events behind pins that `state` does not know: after a damaged journal, or on an earlier pod's volume.

    The caller applies each before it asks for the next. They come in the order of announcement, which decides which
    checkpoint is the newest. Trainers can write descriptors, so each one is checked as an announcement is.
    """
    described_saves = _described(staging, state, may_read)
    for announcements, described, files in sorted(described_saves, key=lambda found: _order(found[0])):
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
    staging: StagingArea, state: State, may_read: Callable[[str], bool]
) -> Iterator[tuple[Sequence[Announced], StagedDescriptor, StagedFiles]]:
    """Yield the announcements, the descriptor and the files of everything that is staged.

    Drops the pins of snapshots that `state` does not know: their files are still where the program wrote them.
    """
    for described, files in staging.scan(may_read):
        if not described.announcements:
            save = save_of_pin(files[0].pin)
            if save not in state.checkpoints:
                log.info("staging.snapshot_dropped", save=save)
                staging.release(save)
            continue
        try:
            announced = [decode_announcement(text) for text in described.announcements]
        except UnknownRecordError as error:
            log.warning("staging.unknown_descriptor", error=str(error))
            continue
        yield announced, described, files


def _order(announcements: Sequence[Announced]) -> tuple[float, int, int]:
    """Sort key: a checkpoint is as old as its first announcement."""
    first = min(announcements, key=lambda announcement: announcement.at)
    return first.at, first.info.step, first.rank

"""Pins announced files, and finds pins again whose announcement the journal has lost."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor

import structlog

from mooring_agent.core import admission
from mooring_agent.core.commands import Stage
from mooring_agent.core.errors import RequestError
from mooring_agent.core.event_codec import UnknownRecordError, decode_event, encode_event
from mooring_agent.core.events import Announced, DurableEvent, Staged
from mooring_agent.core.model import StagedFile
from mooring_agent.core.pack_plan import PACK_BYTES
from mooring_agent.core.state import Share, State
from mooring_agent.core.work import Operation, WorkId
from mooring_agent.ports import Clock, StagedDescriptor, StageRequest, StagingArea

log = structlog.get_logger("mooring.staging")


async def stage(staging: StagingArea, clock: Clock, executor: Executor, command: Stage) -> Staged:
    """Pin files. All that was announced of them is stored beside them, so that the volume describes itself."""
    announced = command.announcements[0]
    request = StageRequest(
        save=command.work.save,
        rank=command.work.rank,
        source=announced.source,
        files=announced.files,
        private=command.private,
        rewritten_inodes=command.rewritten_inodes,
        # Of several ranks that write beside each other, the one that announced last has seen what all of them wrote.
        signatures=frozenset(one.signature for one in command.announcements if one.signature),
        descriptor=descriptor(command),
    )
    files = await asyncio.get_running_loop().run_in_executor(executor, staging.stage, request)
    return Staged(
        at=clock.now(),
        work=command.work,
        files=files,
        part_size_bytes=command.part_size_bytes,
        pack_size_bytes=command.pack_size_bytes,
    )


def descriptor(command: Stage) -> StagedDescriptor:
    """What is stored beside the pins, to be read by `rescan`."""
    return StagedDescriptor(
        announcements=tuple(encode_event(announcement).decode() for announcement in command.announcements),
        part_size_bytes=command.part_size_bytes,
        pack_size_bytes=command.pack_size_bytes,
    )


def rescan(staging: StagingArea, state: State) -> Iterator[DurableEvent]:
    """The events behind pins that `state` knows nothing of; after a damaged journal, or on a claim of an earlier pod.

    The caller applies each before it asks for the next. They come in the order in which they were announced, for that
    says which checkpoint is the newest. Trainers can write descriptors, so each is judged as an announcement is.
    """
    for announcements, described, files in sorted(_described(staging), key=lambda found: _order(found[0])):
        first = announcements[0]
        try:
            for announcement in announcements:
                if announcement.rank not in _shares(state, first):
                    admission.check(state, announcement)
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


def _shares(state: State, announced: Announced) -> Mapping[int, Share]:
    checkpoint = state.checkpoints.get(announced.info.save)
    # One whose pins failed was announced again since, of which nothing but the descriptor may have been written.
    return checkpoint.shares if checkpoint and not checkpoint.begins_anew else {}


def _described(
    staging: StagingArea,
) -> Iterator[tuple[Sequence[Announced], StagedDescriptor, tuple[StagedFile, ...]]]:
    """Announcements, what else is told of them, and files of everything that is staged."""
    for described, files in staging.scan():
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
    """By the first of them: a checkpoint is as old as the first news of it."""
    first = min(announcements, key=lambda announcement: announcement.at)
    return first.at, first.info.step, first.rank

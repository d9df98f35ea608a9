"""Pins announced files, and finds pins again whose announcement the journal has lost."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import Executor

import structlog

from mooring_agent.core.commands import Stage
from mooring_agent.core.event_codec import UnknownRecordError, decode_event, encode_event
from mooring_agent.core.events import Announced, DurableEvent, Staged
from mooring_agent.core.model import StagedFile
from mooring_agent.core.state import State
from mooring_agent.core.work import Operation, WorkId
from mooring_agent.ports import Clock, StageRequest, StagingArea

_ANNOUNCEMENT = "announcement"
_PART_SIZE = "part_size_bytes"

log = structlog.get_logger("mooring.staging")


async def stage(staging: StagingArea, clock: Clock, executor: Executor, command: Stage) -> Staged:
    """Pin one rank's files. The announcement is stored beside them, so that the volume describes itself."""
    announcement = Announced(
        at=command.announced_at,
        info=command.info,
        rank=command.work.rank,
        source=command.source,
        files=command.files,
        local_world_size=command.local_world_size,
        signature=command.signature,
    )
    request = StageRequest(
        save=command.info.save,
        rank=command.work.rank,
        source=command.source,
        files=command.files,
        private=command.private,
        descriptor={_ANNOUNCEMENT: encode_event(announcement).decode(), _PART_SIZE: command.part_size_bytes},
    )
    files = await asyncio.get_running_loop().run_in_executor(executor, staging.stage, request)
    return Staged(at=clock.now(), work=command.work, files=files, part_size_bytes=command.part_size_bytes)


def rescan(staging: StagingArea, state: State) -> Iterator[DurableEvent]:
    """The events behind pins that `state` knows nothing of; after a damaged journal.

    In the order in which they were announced, for that says which checkpoint is the newest.
    """
    for announcement, part_size_bytes, files in sorted(_described(staging), key=lambda found: _order(found[0])):
        checkpoint = state.checkpoints.get(announcement.info.save)
        share = checkpoint.shares.get(announcement.rank) if checkpoint else None
        if share is None:
            log.info("staging.found_again", save=announcement.info.save, rank=announcement.rank)
            yield announcement
        if share is None or not share.staged:
            work = WorkId(Operation.STAGE, announcement.info.save, announcement.rank)
            preferred_bytes = part_size_bytes or state.settings.transfer.part_size_bytes
            yield Staged(at=announcement.at, work=work, files=files, part_size_bytes=preferred_bytes)


def _described(staging: StagingArea) -> Iterator[tuple[Announced, int | None, tuple[StagedFile, ...]]]:
    """Announcement, part size where it is told, and files of everything that is staged."""
    for descriptor, files in staging.scan():
        try:
            announcement = decode_event(str(descriptor.get(_ANNOUNCEMENT, "")).encode())
        except UnknownRecordError as error:
            log.warning("staging.unknown_descriptor", error=str(error))
            continue
        if not isinstance(announcement, Announced):
            log.warning("staging.unknown_descriptor", error=f"{type(announcement).__name__} is no announcement")
            continue
        part_size_bytes = descriptor.get(_PART_SIZE)
        yield announcement, part_size_bytes if isinstance(part_size_bytes, int) else None, files


def _order(announcement: Announced) -> tuple[float, int, int]:
    return announcement.at, announcement.info.step, announcement.rank

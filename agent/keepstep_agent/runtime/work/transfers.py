"""Stages announced files, and transfers them: begin, send, complete.

A checksum is computed before its bytes are sent.
"""

import asyncio
from concurrent.futures import Executor
from pathlib import Path

import structlog

from keepstep_agent.adapters.checksum import region_checksum
from keepstep_agent.adapters.pack import read_pack
from keepstep_agent.catalog.object_reads import if_there
from keepstep_agent.core.agent.commands import CompleteUpload, CreateUpload, PutFile, PutPack, SendPart, Stage
from keepstep_agent.core.agent.events import FileStored, PackStored, PartStored, Staged, UploadCreated
from keepstep_agent.core.errors import StoreError
from keepstep_agent.core.file_lists import paths_of
from keepstep_agent.ports import Clock, ObjectStore, StagedDescriptor, StageRequest, StagingArea
from keepstep_agent.runtime.engine.event_codec import encode_announcement

log = structlog.get_logger("keepstep.staging")


async def stage(staging: StagingArea, clock: Clock, executor: Executor, command: Stage) -> Staged:
    """Pin files, and store their announcements beside them, so that the volume describes itself."""
    announced = command.announcements[0]
    request = StageRequest(
        save=command.work.save,
        rank=command.work.rank,
        path=announced.path,
        files=announced.files,
        others=announced.others,
        private=command.private,
        rewritten_inodes=command.rewritten_inodes,
        # If several ranks write into one directory, the last to announce has seen what all of them wrote.
        signatures=frozenset(one.signature for one in command.announcements if one.signature),
        descriptor=descriptor(command),
        sources=announced.snapshot.files if announced.snapshot else None,
        kept=paths_of(announced.snapshot.kept) if announced.snapshot else (),
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
    """Return what is stored beside the pins for `rescan`. A snapshot cannot be found again: a new one is taken."""
    return StagedDescriptor(
        announcements=tuple(
            encode_announcement(announcement) for announcement in command.announcements if not announcement.snapshot
        ),
        part_size_bytes=command.part_size_bytes,
        pack_size_bytes=command.pack_size_bytes,
    )


async def create_upload(store: ObjectStore, clock: Clock, command: CreateUpload) -> UploadCreated:
    upload = await store.create_upload(command.key)
    return UploadCreated(at=clock.now(), work=command.work, upload=upload)


async def send_part(store: ObjectStore, clock: Clock, executor: Executor, command: SendPart) -> PartStored:
    work, region = command.work, command.region
    checksum = await asyncio.get_running_loop().run_in_executor(executor, region_checksum, region)
    receipt = await store.put_part(command.key, work.upload, work.number, region, checksum)
    return PartStored(at=clock.now(), work=work, receipt=receipt, checksum=checksum, size_bytes=region.size_bytes)


async def put_file(store: ObjectStore, clock: Clock, executor: Executor, command: PutFile) -> FileStored:
    checksum = await asyncio.get_running_loop().run_in_executor(executor, region_checksum, command.region)
    await store.put_data(command.key, command.region, checksum)
    size_bytes = command.region.size_bytes
    return FileStored(
        at=clock.now(), work=command.work, checksum=checksum if size_bytes else None, size_bytes=size_bytes
    )


async def put_pack(
    store: ObjectStore, clock: Clock, executor: Executor, room: asyncio.Semaphore, command: PutPack
) -> PackStored:
    """`room` bounds how many packs are in memory at a time."""
    async with room:
        loop = asyncio.get_running_loop()
        body = await loop.run_in_executor(executor, read_pack, command.pack, Path(command.volume))
        await store.put_data(command.key, body.data, body.checksum)
    size_bytes = sum(file.size_bytes for file in command.pack.files)
    return PackStored(at=clock.now(), work=command.work, checksums=body.file_checksums, size_bytes=size_bytes)


async def complete_upload(store: ObjectStore, clock: Clock, command: CompleteUpload) -> FileStored:
    """Complete an upload, or find it complete: the key is this save's alone, so an object of our size is ours."""
    try:
        await store.complete_upload(command.key, command.work.upload, command.receipts)
    except StoreError as error:
        stored = await if_there(store.head(command.key))
        if stored is None or stored.size_bytes != command.size_bytes:
            raise error
    # The parts were counted one by one; completing them adds no bytes.
    return FileStored(at=clock.now(), work=command.work, checksum=None, size_bytes=0)

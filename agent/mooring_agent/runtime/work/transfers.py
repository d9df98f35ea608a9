"""Stages announced files, and transfers them: begin, send, complete.

A checksum is computed before its bytes are sent.
"""

import asyncio
from concurrent.futures import Executor
from pathlib import Path

import structlog

from mooring_agent.adapters.checksum import region_checksum
from mooring_agent.adapters.pack import read_pack
from mooring_agent.core.agent.commands import CompleteUpload, CreateUpload, PutFile, PutPack, SendPart, Stage
from mooring_agent.core.agent.event_codec import encode_event
from mooring_agent.core.agent.events import (
    FileStored,
    PackStored,
    PartStored,
    Staged,
    UploadCreated,
)
from mooring_agent.core.errors import ErrorKind, StoreError
from mooring_agent.ports import Clock, ObjectStore, StagedDescriptor, StageRequest, StagingArea

log = structlog.get_logger("mooring.staging")


async def stage(staging: StagingArea, clock: Clock, executor: Executor, command: Stage) -> Staged:
    """Pin files, and store their announcements beside them, so that the volume describes itself."""
    announced = command.announcements[0]
    request = StageRequest(
        save=command.work.save,
        rank=command.work.rank,
        path=announced.path,
        files=announced.files,
        private=command.private,
        rewritten_inodes=command.rewritten_inodes,
        # If several ranks write into one directory, the last to announce has seen what all of them wrote.
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
    """Return what is stored beside the pins for `rescan`."""
    return StagedDescriptor(
        announcements=tuple(encode_event(announcement).decode() for announcement in command.announcements),
        part_size_bytes=command.part_size_bytes,
        pack_size_bytes=command.pack_size_bytes,
    )


async def create_upload(store: ObjectStore, clock: Clock, command: CreateUpload) -> UploadCreated:
    upload_id = await store.create_upload(command.key)
    return UploadCreated(at=clock.now(), work=command.work, upload_id=upload_id)


async def send_part(store: ObjectStore, clock: Clock, executor: Executor, command: SendPart) -> PartStored:
    loop = asyncio.get_running_loop()
    checksum = await loop.run_in_executor(executor, region_checksum, command.region)
    etag = await store.put_part(command.key, command.upload_id, command.work.number, command.region, checksum)
    return PartStored(
        at=clock.now(), work=command.work, etag=etag, checksum=checksum, size_bytes=command.region.size_bytes
    )


async def put_file(store: ObjectStore, clock: Clock, executor: Executor, command: PutFile) -> FileStored:
    loop = asyncio.get_running_loop()
    checksum = await loop.run_in_executor(executor, region_checksum, command.region)
    await store.put_region(command.key, command.region, checksum)
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
        await store.put_bytes(command.key, body.data, body.checksum)
    size_bytes = sum(file.size_bytes for file in command.pack.files)
    return PackStored(at=clock.now(), work=command.work, checksums=body.file_checksums, size_bytes=size_bytes)


async def complete_upload(store: ObjectStore, clock: Clock, command: CompleteUpload) -> FileStored:
    """Complete an upload, or find it complete: the key is this save's alone, so an object of our size is ours."""
    try:
        await store.complete_upload(command.key, command.upload_id, command.etags)
    except StoreError as error:
        if not await _is_stored(store, command):
            raise error
    # The parts were counted one by one; completing them adds no bytes.
    return FileStored(at=clock.now(), work=command.work, checksum=None, size_bytes=0)


async def _is_stored(store: ObjectStore, command: CompleteUpload) -> bool:
    try:
        info = await store.head(command.key)
    except StoreError as error:
        if error.kind is ErrorKind.NOT_FOUND:
            return False
        raise
    return info.size_bytes == command.size_bytes

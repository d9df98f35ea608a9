"""A directory as the destination: a laptop's disk, a network filesystem, a mounted volume claim.

Owns threads, time-outs and the meaning of errno; `file_store.directory` owns what happens on the disk.
"""

import asyncio
import errno
import os
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from keepstep_agent.adapters.checksum import crc64nvme
from keepstep_agent.adapters.durable_files import opened, write_all
from keepstep_agent.adapters.file_store.directory import ObjectDirectory, identity
from keepstep_agent.adapters.rate_limit import RateLimiter
from keepstep_agent.adapters.region_file import RegionFile
from keepstep_agent.adapters.transfer.sink import PositionedFileWriter
from keepstep_agent.adapters.transfer.upload_body import PIECE_BYTES, BufferPool, FileBody
from keepstep_agent.core.errors import ErrorKind, KeepstepError, StoreError, checkpoint_corrupt
from keepstep_agent.core.model import Region
from keepstep_agent.core.settings.values import StoreSettings
from keepstep_agent.core.stored.object_layout import PROBE_PREFIX
from keepstep_agent.ports import ObjectInfo, PartInfo, StoreCapabilities, UploadInfo

_Result = TypeVar("_Result")

_THREADS: Final = 4
_INCOMING_BYTES: Final = 1024 * 1024
_ERRNOS: Final = {
    errno.ENOSPC: (ErrorKind.STORE_FULL, "free space at the destination, or keep fewer checkpoints"),
    errno.EDQUOT: (ErrorKind.STORE_FULL, "raise the quota at the destination, or keep fewer checkpoints"),
    **dict.fromkeys(
        (errno.EACCES, errno.EPERM),
        (ErrorKind.ACCESS_DENIED, "give the agent's user write access to the destination"),
    ),
    errno.EROFS: (ErrorKind.ACCESS_DENIED, "mount the destination read-write"),
    errno.ENAMETOOLONG: (ErrorKind.REQUEST_REFUSED, "use shorter file names in checkpoints"),
    **dict.fromkeys(
        (errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENOTEMPTY),
        (
            ErrorKind.REQUEST_REFUSED,
            "two ranks use one path as a file and as a folder: rename one of them in the trainer",
        ),
    ),
    errno.EFBIG: (ErrorKind.REQUEST_REFUSED, "the destination's filesystem does not allow files of this size"),
    errno.ETIMEDOUT: (ErrorKind.TIMED_OUT, ""),
    errno.ENOTCONN: (ErrorKind.UNREACHABLE, "mount the destination again: its mount is broken"),
}
"""The error kind and hint for each errno; all others are STORE_FAILED."""


class FilesystemStore:
    """See `ports.ObjectStore`. The parts of one upload must be consecutive regions of one file, as Keepstep's are."""

    def __init__(self, settings: StoreSettings, limiter: RateLimiter) -> None:
        """Raises BAD_CONFIGURATION if the destination is not an absolute path."""
        self._objects = ObjectDirectory(parse_directory(settings.destination))
        self._limiter = limiter
        self._timeout_seconds = settings.read_timeout_seconds
        self._executor = ThreadPoolExecutor(_THREADS, thread_name_prefix="keepstep-store")
        self._outgoing = BufferPool(PIECE_BYTES)
        self._incoming = BufferPool(_INCOMING_BYTES)
        self._conditional_put = False

    async def probe(self) -> StoreCapabilities:
        key = f"{PROBE_PREFIX}{secrets.token_hex(8)}"
        self._conditional_put = await self._run(key, partial(_links_refuse, self._objects, key))
        # Bytes are checked while they are copied. After that, integrity is up to the filesystem.
        return StoreCapabilities(conditional_put=self._conditional_put, integrity="crc64nvme")

    async def put(self, key: str, body: bytes, *, if_absent: bool = False) -> None:
        exclusive = if_absent and self._conditional_put
        await self._run(key, partial(self._objects.write, key, body, if_absent=exclusive))

    async def put_data(self, key: str, content: Region | bytearray, checksum: int) -> None:
        if isinstance(content, bytearray):
            await self._limiter.take(len(content))
            await self._run(key, partial(self._objects.write, key, content))
            return
        aside = await self._run(key, self._objects.new_aside)
        try:
            await self._copy(key, aside, content, checksum, 0)
            await self._run(key, partial(self._objects.publish, aside, key))
        finally:
            # Not awaited: a cancelled put must end even if all threads hang in a dead mount.
            self._executor.submit(aside.unlink, missing_ok=True)

    async def create_upload(self, key: str) -> str:
        return await self._run(key, partial(self._objects.create_upload, key))

    async def put_part(self, key: str, upload: str, number: int, region: Region, checksum: int) -> str:
        data = await self._run(key, partial(self._objects.upload_data, key, upload))
        try:
            await self._copy(key, data, region, checksum, region.offset_bytes)
        except StoreError as error:
            if error.kind is ErrorKind.STORE_FAILED:
                # If the upload was completed or aborted during the copy, raise UPLOAD_LOST instead.
                await self._run(key, partial(self._objects.upload_data, key, upload))
            raise
        receipt = f"{checksum:016x}"
        await self._run(key, partial(self._objects.record_part, key, upload, number, region, receipt))
        return receipt

    async def list_parts(self, key: str, upload: str) -> Sequence[PartInfo]:
        return await self._run(key, partial(self._objects.list_parts, key, upload))

    async def complete_upload(self, key: str, upload: str, receipts: Sequence[str]) -> None:
        await self._run(key, partial(self._objects.complete_upload, key, upload, receipts))

    async def abort_upload(self, key: str, upload: str) -> None:
        await self._run(key, partial(self._objects.abort_upload, key, upload))

    async def list_uploads(self, prefix: str) -> AsyncIterator[UploadInfo]:
        for found in await self._run(prefix, partial(self._objects.uploads, prefix)):
            yield found

    async def head(self, key: str) -> ObjectInfo:
        return await self._read(key, partial(self._objects.head, key))

    async def get(self, key: str, *, limit_bytes: int, fresh: bool = False) -> bytes:
        return await self._read(key, partial(self._objects.read, key, limit_bytes))

    async def get_into(self, key: str, *, offset_bytes: int, size_bytes: int, version: str, descriptor: int) -> int:
        sink = PositionedFileWriter(descriptor, offset_bytes)
        buffer = self._incoming.take()
        checksum = 0
        try:
            for position in range(offset_bytes, offset_bytes + size_bytes, len(buffer)):
                piece = buffer[: offset_bytes + size_bytes - position]
                checksum = await self._read(
                    key, partial(_copy_piece, self._objects, key, version, position, piece, sink, checksum)
                )
            # Only on success: a thread that hangs in a dead mount may still write into the buffer at any time.
            self._incoming.release(buffer)
            return checksum
        finally:
            # Not awaited, as above.
            self._executor.submit(sink.close)

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        for info in await self._run(prefix, partial(self._objects.listing, prefix)):
            yield info

    async def list_folders(self, prefix: str) -> AsyncIterator[str]:
        for folder in await self._run(prefix, partial(self._objects.folders, prefix)):
            yield folder

    async def delete(self, key: str) -> None:
        await self._run(key, partial(self._objects.delete, key))

    async def aborts_uploads(self) -> None:
        """A directory has no rules."""

    async def keeps_old_versions(self) -> None:
        """A directory has no versions. What its filesystem keeps in snapshots cannot be known here."""

    async def close(self) -> None:
        self._executor.shutdown(wait=False)

    async def _copy(self, key: str, target: Path, region: Region, checksum: int, position: int) -> None:
        """Write a region into `target`, verified. The last piece is written only if the region's checksum is right."""
        file = RegionFile(region)
        try:
            await asyncio.get_running_loop().run_in_executor(self._executor, file.open)
            body = FileBody(
                file, region, checksum, buffers=self._outgoing, executor=self._executor, limiter=self._limiter
            )
            async for piece in body.pieces():
                await self._run(key, partial(_write_piece, target, piece, position))
                position += len(piece)
        finally:
            # Not awaited, as above.
            self._executor.submit(file.close)

    async def _read(self, key: str, function: Callable[[], _Result]) -> _Result:
        """As `_run`, for a read, where ENOENT means that there is no such object."""
        return await self._run(key, partial(self._objects.find, function))

    async def _run(self, key: str, function: Callable[[], _Result]) -> _Result:
        """Run a function in a thread, with a time-out, and turn OSError into StoreError.

        A thread that hangs in a dead mount is abandoned. For a write, ENOENT means that the folder or its mount went
        away: STORE_FAILED.
        """
        place = f"{self._objects.root}/{key}"
        try:
            async with asyncio.timeout(self._timeout_seconds):
                return await asyncio.get_running_loop().run_in_executor(self._executor, function)
        except TimeoutError as error:
            raise StoreError(ErrorKind.TIMED_OUT, f"{place}: the filesystem did not answer in time") from error
        except OSError as error:
            kind, hint = _ERRNOS.get(error.errno or 0, (ErrorKind.STORE_FAILED, ""))
            raise StoreError(kind, f"{place}: {error.strerror or error}", hint=hint) from error


def parse_directory(url: str) -> Path:
    """Return the folder of file:///path. Raises BAD_CONFIGURATION if it is not an absolute path on this machine.

    People type it, so the path is taken literally, as a prefix of s3:// is: `#`, `?` and `%` have no special meaning.
    """
    path = Path(url.removeprefix("file://"))
    if not url.startswith("file:///") or "\0" in url:
        raise KeepstepError(
            ErrorKind.BAD_CONFIGURATION, f"{url!r} is not a directory", hint="write it as file:///absolute/path"
        )
    return path


def _links_refuse(objects: ObjectDirectory, key: str) -> bool:
    """Whether a hard link refuses to replace a file. False also without hard links, as on some network filesystems."""
    objects.write(key, b"")
    try:
        objects.write(key, b"", if_absent=True)
    except StoreError as error:
        return error.kind is ErrorKind.ALREADY_EXISTS
    except OSError:
        return False
    finally:
        objects.delete(key)
    return False


def _write_piece(target: Path, data: memoryview, position: int) -> None:
    with opened(target, os.O_WRONLY) as descriptor:
        write_all(descriptor, data, position)


def _copy_piece(
    objects: ObjectDirectory,
    key: str,
    version: str,
    position: int,
    piece: memoryview,
    sink: PositionedFileWriter,
    checksum: int,
) -> int:
    """Read a piece of the object into `piece` and write it to `sink`. Return the CRC64NVME so far."""
    with objects.opened_to_read(key) as source:
        if identity(source) != version:
            raise _corrupt(objects.path(key), f"its version is {identity(source)} instead of {version}")
        count = os.preadv(source, [piece], position)
    if count < len(piece):
        raise _corrupt(objects.path(key), f"it ends at byte {position + count}")
    sink.write(piece)
    return crc64nvme(piece, checksum)


def _corrupt(path: Path, reason: str) -> StoreError:
    return checkpoint_corrupt(f"{path} is not what was written: {reason}")

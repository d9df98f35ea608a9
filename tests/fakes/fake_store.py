"""An object store in memory, with the contract of the real ones.

Region bytes go through the real FileBody, so that a changed file is found here exactly as it is found there.
`fail` queues errors: the next call of that name raises instead of acting, or after acting, like a lost answer.
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count

from mooring_agent.adapters.checksum import crc64nvme
from mooring_agent.adapters.rate_limit import RateLimiter
from mooring_agent.adapters.region_file import RegionFile
from mooring_agent.adapters.transfer.sink import PositionedFileWriter
from mooring_agent.adapters.transfer.upload_body import PIECE_BYTES, BufferPool, FileBody
from mooring_agent.core.errors import ErrorKind, StoreError
from mooring_agent.core.model import Region
from mooring_agent.ports import ObjectInfo, PartInfo, StoreCapabilities, UploadInfo


@dataclass(slots=True)
class StoredObject:
    body: bytes
    etag: str
    modified_at: float


@dataclass(slots=True)
class StoredUpload:
    key: str
    started_at: float
    parts: dict[int, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Failure:
    error: StoreError
    after_acting: bool


class FakeStore:
    """`objects` and `uploads` may be looked at and changed by tests."""

    def __init__(self, *, conditional_put: bool = True, now: float = 1_700_000_000.0) -> None:
        self.objects: dict[str, StoredObject] = {}
        self.uploads: dict[str, StoredUpload] = {}
        self.calls: list[tuple[str, str]] = []
        self.now = now
        self.closed = False
        self.capabilities = StoreCapabilities(conditional_put=False, integrity="crc64nvme")
        self._conditional_put = conditional_put
        self._failures: dict[str, list[_Failure]] = {}
        self._ids = count(1)
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="fake-store")

    def fail(self, method: str, kind: ErrorKind, *, times: int = 1, after_acting: bool = False) -> None:
        error = StoreError(kind, f"{method} fails because a test wants it to")
        self._failures.setdefault(method, []).extend([_Failure(error, after_acting)] * times)

    async def probe(self) -> StoreCapabilities:
        self._called("probe", "")
        self.capabilities = StoreCapabilities(conditional_put=self._conditional_put, integrity="crc64nvme")
        return self.capabilities

    async def put(self, key: str, body: bytes, *, if_absent: bool = False) -> str:
        lost = self._called("put", key)
        if if_absent and self.capabilities.conditional_put and key in self.objects:
            raise StoreError(ErrorKind.ALREADY_EXISTS, f"{key} exists already")
        return self._store(key, body, lost)

    async def put_region(self, key: str, region: Region, checksum: int) -> str:
        lost = self._called("put_region", key)
        return self._store(key, await self._read(region, checksum), lost)

    async def put_bytes(self, key: str, body: bytearray, checksum: int) -> str:
        lost = self._called("put_bytes", key)
        assert crc64nvme(body) == checksum
        return self._store(key, bytes(body), lost)

    async def create_upload(self, key: str) -> str:
        lost = self._called("create_upload", key)
        upload_id = f"upload-{next(self._ids)}"
        self.uploads[upload_id] = StoredUpload(key=key, started_at=self.now)
        _answer(lost)
        return upload_id

    async def put_part(self, key: str, upload_id: str, number: int, region: Region, checksum: int) -> str:
        lost = self._called("put_part", key)
        self._upload(key, upload_id)
        body = await self._read(region, checksum)
        self._upload(key, upload_id).parts[number] = body
        _answer(lost)
        return _etag(body)

    async def list_parts(self, key: str, upload_id: str) -> Sequence[PartInfo]:
        self._called("list_parts", key)
        parts = sorted(self._upload(key, upload_id).parts.items())
        return [PartInfo(number=number, size_bytes=len(body), etag=_etag(body)) for number, body in parts]

    async def complete_upload(self, key: str, upload_id: str, etags: Sequence[str]) -> str:
        lost = self._called("complete_upload", key)
        parts = [body for _, body in sorted(self._upload(key, upload_id).parts.items())]
        if [_etag(body) for body in parts] != list(etags):
            raise StoreError(ErrorKind.UPLOAD_LOST, f"the parts of {key} are not those")
        del self.uploads[upload_id]
        return self._store(key, b"".join(parts), lost)

    async def abort_upload(self, key: str, upload_id: str) -> None:
        lost = self._called("abort_upload", key)
        self.uploads.pop(upload_id, None)
        _answer(lost)

    async def list_uploads(self, prefix: str) -> AsyncIterator[UploadInfo]:
        self._called("list_uploads", prefix)
        for upload_id, upload in list(self.uploads.items()):
            if upload.key.startswith(prefix):
                yield UploadInfo(key=upload.key, upload_id=upload_id, started_at=upload.started_at)

    async def head(self, key: str) -> ObjectInfo:
        self._called("head", key)
        return _info(key, self._object(key))

    async def get(self, key: str, *, limit_bytes: int, fresh: bool = False) -> bytes:
        self._called("get", key)
        body = self._object(key).body
        if len(body) > limit_bytes:
            raise StoreError(ErrorKind.REQUEST_REFUSED, f"{key} has {len(body)} bytes, more than {limit_bytes}")
        return body

    async def get_into(self, key: str, *, offset_bytes: int, size_bytes: int, etag: str, descriptor: int) -> int:
        self._called("get_into", key)
        stored = self._object(key)
        body = stored.body[offset_bytes : offset_bytes + size_bytes]
        if stored.etag != etag or len(body) != size_bytes:
            raise StoreError(ErrorKind.CHECKPOINT_CORRUPT, f"{key} is not what was written")
        sink = PositionedFileWriter(descriptor, offset_bytes)
        try:
            sink.write(memoryview(body))
        finally:
            sink.close()
        return crc64nvme(body)

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        self._called("list", prefix)
        for key in sorted(self.objects, key=str.encode):
            if key.startswith(prefix) and key in self.objects:
                yield _info(key, self.objects[key])

    async def delete(self, key: str) -> None:
        lost = self._called("delete", key)
        self.objects.pop(key, None)
        _answer(lost)

    async def close(self) -> None:
        self.closed = True
        self._executor.shutdown()

    def _called(self, method: str, key: str) -> StoreError | None:
        """Raises a queued failure, or returns the one to raise after acting."""
        self.calls.append((method, key))
        queue = self._failures.get(method)
        if not queue:
            return None
        failure = queue.pop(0)
        if failure.after_acting:
            return failure.error
        raise failure.error

    def _store(self, key: str, body: bytes, lost: StoreError | None) -> str:
        self.objects[key] = StoredObject(body, _etag(body), self.now)
        _answer(lost)
        return _etag(body)

    async def _read(self, region: Region, checksum: int) -> bytes:
        file = RegionFile(region)
        try:
            await asyncio.get_running_loop().run_in_executor(self._executor, file.open)
            body = FileBody(
                file,
                region,
                checksum,
                buffers=BufferPool(PIECE_BYTES),
                executor=self._executor,
                limiter=RateLimiter(),
            )
            return b"".join([bytes(piece) async for piece in body.pieces()])
        finally:
            file.close()

    def _object(self, key: str) -> StoredObject:
        if key not in self.objects:
            raise StoreError(ErrorKind.NOT_FOUND, f"there is no {key}")
        return self.objects[key]

    def _upload(self, key: str, upload_id: str) -> StoredUpload:
        upload = self.uploads.get(upload_id)
        if not upload or upload.key != key:
            raise StoreError(ErrorKind.UPLOAD_LOST, f"there is no upload {upload_id} of {key}")
        return upload


def _answer(lost: StoreError | None) -> None:
    if lost:
        raise lost


def _etag(body: bytes) -> str:
    return hashlib.md5(body, usedforsecurity=False).hexdigest()


def _info(key: str, stored: StoredObject) -> ObjectInfo:
    return ObjectInfo(key=key, size_bytes=len(stored.body), etag=stored.etag, modified_at=stored.modified_at)

"""An object store in memory: the smallest one that passes the conformance suite.

What a store of your own must do beyond it is in docs/contributing/store.md. Tests may look at `objects` and `uploads`,
and change them.
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from itertools import count

from keepstep_agent.adapters.checksum import crc64nvme, require_checksum
from keepstep_agent.adapters.region_file import RegionFile
from keepstep_agent.adapters.transfer.sink import PositionedFileWriter
from keepstep_agent.core.errors import ErrorKind, StoreError, checkpoint_corrupt, object_too_large
from keepstep_agent.core.model import Region
from keepstep_agent.ports import ObjectInfo, PartInfo, StoreCapabilities, UploadInfo


@dataclass(slots=True)
class StoredObject:
    body: bytes
    modified_at: float


@dataclass(slots=True)
class StoredUpload:
    key: str
    started_at: float
    parts: dict[int, bytes] = field(default_factory=dict)


class MemoryStore:
    """See `ports.ObjectStore`. Versions and receipts are digests; an upload's token is a number."""

    def __init__(self, *, conditional_put: bool = True, now: float = 1_700_000_000.0) -> None:
        self.objects: dict[str, StoredObject] = {}
        self.uploads: dict[str, StoredUpload] = {}
        self.now = now
        self._conditional_put = conditional_put
        self._tokens = count(1)

    async def probe(self) -> StoreCapabilities:
        return StoreCapabilities(conditional_put=self._conditional_put, integrity="crc64nvme")

    async def put(self, key: str, body: bytes, *, if_absent: bool = False) -> None:
        if if_absent and self._conditional_put and key in self.objects:
            raise StoreError(ErrorKind.ALREADY_EXISTS, f"{key} exists already")
        self.objects[key] = StoredObject(body, self.now)

    async def put_data(self, key: str, content: Region | bytearray, checksum: int) -> None:
        body = content if isinstance(content, bytearray) else await asyncio.to_thread(_read, content, checksum)
        self.objects[key] = StoredObject(bytes(body), self.now)

    async def create_upload(self, key: str) -> str:
        upload = f"upload-{next(self._tokens)}"
        self.uploads[upload] = StoredUpload(key, self.now)
        return upload

    async def put_part(self, key: str, upload: str, number: int, region: Region, checksum: int) -> str:
        self._upload(key, upload)
        body = await asyncio.to_thread(_read, region, checksum)
        self._upload(key, upload).parts[number] = body
        return _digest(body)

    async def list_parts(self, key: str, upload: str) -> Sequence[PartInfo]:
        return [
            PartInfo(number=number, size_bytes=len(body), receipt=_digest(body), md5=_digest(body))
            for number, body in sorted(self._upload(key, upload).parts.items())
        ]

    async def complete_upload(self, key: str, upload: str, receipts: Sequence[str]) -> None:
        parts = [body for _, body in sorted(self._upload(key, upload).parts.items())]
        if [_digest(body) for body in parts] != list(receipts):
            raise StoreError(ErrorKind.UPLOAD_LOST, f"the parts of {key} are not those")
        del self.uploads[upload]
        self.objects[key] = StoredObject(b"".join(parts), self.now)

    async def abort_upload(self, key: str, upload: str) -> None:
        self.uploads.pop(upload, None)

    async def list_uploads(self, prefix: str) -> AsyncIterator[UploadInfo]:
        for upload, begun in list(self.uploads.items()):
            if begun.key.startswith(prefix):
                yield UploadInfo(key=begun.key, upload=upload, started_at=begun.started_at)

    async def head(self, key: str) -> ObjectInfo:
        return _info(key, self._object(key))

    async def get(self, key: str, *, limit_bytes: int, fresh: bool = False) -> bytes:
        body = self._object(key).body
        if len(body) > limit_bytes:
            raise object_too_large(key, len(body), limit_bytes)
        return body

    async def get_into(self, key: str, *, offset_bytes: int, size_bytes: int, version: str, descriptor: int) -> int:
        whole = self._object(key).body
        body = whole[offset_bytes : offset_bytes + size_bytes]
        if _digest(whole) != version or len(body) != size_bytes:
            raise checkpoint_corrupt(f"{key} is not what was written")
        writer = PositionedFileWriter(descriptor, offset_bytes)
        try:
            await asyncio.to_thread(writer.write, memoryview(body))
        finally:
            writer.close()
        return crc64nvme(body)

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        for key in sorted(self.objects, key=str.encode):
            if key.startswith(prefix) and key in self.objects:
                yield _info(key, self.objects[key])

    async def list_folders(self, prefix: str) -> AsyncIterator[str]:
        names = (key.removeprefix(prefix) for key in self.objects if key.startswith(prefix))
        for folder in sorted({name[: name.index("/") + 1] for name in names if "/" in name}, key=str.encode):
            yield prefix + folder

    async def delete(self, key: str) -> None:
        self.objects.pop(key, None)

    async def aborts_uploads(self) -> bool | None:
        return None

    async def keeps_old_versions(self) -> bool | None:
        return None

    async def close(self) -> None:
        """Hold nothing."""

    def _object(self, key: str) -> StoredObject:
        if key not in self.objects:
            raise StoreError(ErrorKind.NOT_FOUND, f"there is no {key}")
        return self.objects[key]

    def _upload(self, key: str, upload: str) -> StoredUpload:
        begun = self.uploads.get(upload)
        if not begun or begun.key != key:
            raise StoreError(ErrorKind.UPLOAD_LOST, f"there is no upload {upload} of {key}")
        return begun


def _info(key: str, found: StoredObject) -> ObjectInfo:
    digest = _digest(found.body)
    return ObjectInfo(key=key, size_bytes=len(found.body), modified_at=found.modified_at, version=digest, md5=digest)


def _digest(body: bytes) -> str:
    return hashlib.md5(body, usedforsecurity=False).hexdigest()


def _read(region: Region, checksum: int) -> bytes:
    """Return a file's bytes, if they are those that the checksum covers. Blocks."""
    body = bytearray(region.size_bytes)
    with RegionFile(region) as file:
        file.read_into(0, memoryview(body))
        file.check()
    require_checksum(region, crc64nvme(body), checksum)
    return bytes(body)

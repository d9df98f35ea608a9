"""Wraps a store with retries, for commands that people wait for: restore, `mooring ls`, prune.

Never used for uploads by the agent. Retries passing errors only, with exponential backoff and full jitter. Two calls
are not retried: `put` with `if_absent` and `complete_upload` may have worked although they failed, and a second try
would then be refused because of the first. The caller, who knows the bytes, reads back what happened.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import structlog

from mooring_agent.core.errors import PASSING, StoreError
from mooring_agent.core.model import Region
from mooring_agent.ports import ObjectInfo, ObjectStore, PartInfo, StoreCapabilities, UploadInfo

logger = structlog.get_logger(__name__)

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How often to try, and the longest wait before the second attempt and before any later one."""

    attempts: int = 6
    first_wait_seconds: float = 0.5
    longest_wait_seconds: float = 15.0


class RetryingStore:
    """See `ports.ObjectStore`. Closing it closes the store inside."""

    def __init__(
        self,
        store: ObjectStore,
        policy: RetryPolicy | None = None,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        generator: random.Random | None = None,
    ) -> None:
        self._store = store
        self._policy = policy or RetryPolicy()
        self._sleep = sleep
        self._generator = generator or random.Random()  # noqa: S311 - jitter is no secret

    @property
    def capabilities(self) -> StoreCapabilities:
        return self._store.capabilities

    @capabilities.setter
    def capabilities(self, capabilities: StoreCapabilities) -> None:
        self._store.capabilities = capabilities

    async def probe(self) -> StoreCapabilities:
        return await self._retry(self._store.probe)

    async def put(self, key: str, body: bytes, *, if_absent: bool = False) -> str:
        if if_absent:
            return await self._store.put(key, body, if_absent=True)
        return await self._retry(lambda: self._store.put(key, body))

    async def put_region(self, key: str, region: Region, checksum: int) -> str:
        return await self._retry(lambda: self._store.put_region(key, region, checksum))

    async def put_bytes(self, key: str, body: bytearray, checksum: int) -> str:
        return await self._retry(lambda: self._store.put_bytes(key, body, checksum))

    async def create_upload(self, key: str) -> str:
        return await self._retry(lambda: self._store.create_upload(key))

    async def put_part(self, key: str, upload_id: str, number: int, region: Region, checksum: int) -> str:
        return await self._retry(lambda: self._store.put_part(key, upload_id, number, region, checksum))

    async def list_parts(self, key: str, upload_id: str) -> Sequence[PartInfo]:
        return await self._retry(lambda: self._store.list_parts(key, upload_id))

    async def complete_upload(self, key: str, upload_id: str, etags: Sequence[str]) -> str:
        return await self._store.complete_upload(key, upload_id, etags)

    async def abort_upload(self, key: str, upload_id: str) -> None:
        await self._retry(lambda: self._store.abort_upload(key, upload_id))

    async def list_uploads(self, prefix: str) -> AsyncIterator[UploadInfo]:
        seen: set[tuple[str, str]] = set()
        attempt = 1
        while True:
            try:
                async for upload in self._store.list_uploads(prefix):
                    if (upload.key, upload.upload_id) not in seen:
                        seen.add((upload.key, upload.upload_id))
                        yield upload
                return
            except StoreError as error:
                await self._wait(attempt, error)
                attempt += 1

    async def head(self, key: str) -> ObjectInfo:
        return await self._retry(lambda: self._store.head(key))

    async def get(self, key: str, *, limit_bytes: int, fresh: bool = False) -> bytes:
        return await self._retry(lambda: self._store.get(key, limit_bytes=limit_bytes, fresh=fresh))

    async def get_into(self, key: str, *, offset_bytes: int, size_bytes: int, etag: str, descriptor: int) -> int:
        return await self._retry(
            lambda: self._store.get_into(
                key, offset_bytes=offset_bytes, size_bytes=size_bytes, etag=etag, descriptor=descriptor
            )
        )

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        # A listing that broke off starts again and skips what was yielded. It cannot continue after the last key,
        # because SeaweedFS has an order of its own.
        seen: set[str] = set()
        attempt = 1
        while True:
            try:
                async for info in self._store.list(prefix):
                    if info.key not in seen:
                        seen.add(info.key)
                        yield info
                return
            except StoreError as error:
                await self._wait(attempt, error)
                attempt += 1

    async def delete(self, key: str) -> None:
        await self._retry(lambda: self._store.delete(key))

    async def close(self) -> None:
        await self._store.close()

    async def _retry(self, call: Callable[[], Awaitable[_Result]]) -> _Result:
        attempt = 1
        while True:
            try:
                return await call()
            except StoreError as error:
                await self._wait(attempt, error)
                attempt += 1

    async def _wait(self, attempt: int, error: StoreError) -> None:
        """Wait until the next attempt. Raises `error` if there is none."""
        if error.kind not in PASSING or attempt >= self._policy.attempts:
            raise error
        longest = min(self._policy.longest_wait_seconds, self._policy.first_wait_seconds * 2 ** (attempt - 1))
        seconds = self._generator.uniform(0, longest)
        logger.info("store.retry", attempt=attempt, kind=error.kind.value, wait_seconds=round(seconds, 2))
        await self._sleep(seconds)

"""Wraps a store with retries, for commands that people wait for: restore, `keepstep ls`, prune.

Knows nothing of the agent's uploads, whose retries the core decides. Retries passing errors only, with exponential
backoff and full jitter. One call is not retried: `put` with `if_absent` may have worked although it failed, and a
second try would then be refused because of the first. The caller, who knows the bytes, reads back what happened.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import structlog

from keepstep_agent.core.errors import PASSING, StoreError
from keepstep_agent.ports import ObjectInfo, PartInfo, StoreCapabilities, StoreWriter, UploadInfo

logger = structlog.get_logger(__name__)

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How often to try, and the longest wait before the second attempt and before any later one."""

    attempts: int = 6
    first_wait_seconds: float = 0.5
    longest_wait_seconds: float = 15.0


class RetryingStore:
    """See `ports.StoreWriter`. The store inside stays the caller's to close."""

    def __init__(
        self,
        store: StoreWriter,
        policy: RetryPolicy | None = None,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        generator: random.Random | None = None,
    ) -> None:
        self._store = store
        self._policy = policy or RetryPolicy()
        self._sleep = sleep
        self._generator = generator or random.Random()  # noqa: S311 - jitter is no secret

    async def probe(self) -> StoreCapabilities:
        return await self._retry(self._store.probe)

    async def put(self, key: str, body: bytes, *, if_absent: bool = False) -> None:
        if if_absent:
            await self._store.put(key, body, if_absent=True)
        else:
            await self._retry(lambda: self._store.put(key, body))

    async def head(self, key: str) -> ObjectInfo:
        return await self._retry(lambda: self._store.head(key))

    async def get(self, key: str, *, limit_bytes: int, fresh: bool = False) -> bytes:
        return await self._retry(lambda: self._store.get(key, limit_bytes=limit_bytes, fresh=fresh))

    async def get_into(self, key: str, *, offset_bytes: int, size_bytes: int, version: str, descriptor: int) -> int:
        return await self._retry(
            lambda: self._store.get_into(
                key, offset_bytes=offset_bytes, size_bytes=size_bytes, version=version, descriptor=descriptor
            )
        )

    def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        return self._listing(lambda: self._store.list(prefix), lambda info: info.key)

    async def delete(self, key: str) -> None:
        await self._retry(lambda: self._store.delete(key))

    def list_folders(self, prefix: str) -> AsyncIterator[str]:
        return self._listing(lambda: self._store.list_folders(prefix), lambda folder: folder)

    def list_uploads(self, prefix: str) -> AsyncIterator[UploadInfo]:
        return self._listing(lambda: self._store.list_uploads(prefix), lambda found: (found.key, found.upload))

    async def list_parts(self, key: str, upload: str) -> Sequence[PartInfo]:
        return await self._retry(lambda: self._store.list_parts(key, upload))

    async def abort_upload(self, key: str, upload: str) -> None:
        await self._retry(lambda: self._store.abort_upload(key, upload))

    async def _listing(
        self, begin: Callable[[], AsyncIterator[_Result]], name_of: Callable[[_Result], object]
    ) -> AsyncIterator[_Result]:
        # A listing that broke off starts again and skips what was yielded. It cannot continue after the last key,
        # because SeaweedFS has an order of its own.
        seen: set[object] = set()
        attempt = 1
        while True:
            try:
                async for one in begin():
                    if name_of(one) not in seen:
                        seen.add(name_of(one))
                        yield one
                return
            except StoreError as error:
                await self._wait(attempt, error)
                attempt += 1

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

"""The destination, opened and probed at the first use: an agent that has nothing to upload stays small and quick."""

import asyncio
from contextlib import AsyncExitStack

import structlog

from mooring_agent.adapters.open_store import open_store
from mooring_agent.adapters.rate_limit import RateLimiter
from mooring_agent.core.settings import StoreSettings
from mooring_agent.ports import ObjectStore

log = structlog.get_logger("mooring.store")


class LazyStore:
    """`get` opens on the first call; a failed probe raises its StoreError and is tried again by the next call."""

    def __init__(self, settings: StoreSettings, limiter: RateLimiter) -> None:
        self._settings = settings
        self._limiter = limiter
        self._stack = AsyncExitStack()
        self._lock = asyncio.Lock()
        self._opened: ObjectStore | None = None
        self._probed = False

    async def get(self) -> ObjectStore:
        if self._opened is not None and self._probed:
            return self._opened
        async with self._lock:
            if self._opened is None:
                self._opened = await self._stack.enter_async_context(open_store(self._settings, limiter=self._limiter))
            if not self._probed:
                capabilities = await self._opened.probe()
                self._probed = True
                log.info(
                    "store.probed",
                    destination=self._settings.destination,
                    conditional_put=capabilities.conditional_put,
                    integrity=capabilities.integrity,
                )
            return self._opened

    async def close(self) -> None:
        await self._stack.aclose()

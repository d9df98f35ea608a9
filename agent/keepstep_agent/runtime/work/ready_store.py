"""Opens and probes the destination as soon as the agent serves, so that no save waits for the S3 library to load."""

import asyncio
import gc
from contextlib import AsyncExitStack

import structlog

from keepstep_agent.adapters import priority
from keepstep_agent.adapters.open_store import open_store
from keepstep_agent.adapters.rate_limit import RateLimiter
from keepstep_agent.core.errors import KeepstepError
from keepstep_agent.core.settings.values import StoreSettings
from keepstep_agent.ports import ObjectStore

log = structlog.get_logger("keepstep.store")


class ReadyStore:
    """Opens and probes the store once. After a failure the next caller tries again."""

    def __init__(self, settings: StoreSettings, limiter: RateLimiter) -> None:
        self._settings = settings
        self._limiter = limiter
        self._stack = AsyncExitStack()
        self._lock = asyncio.Lock()
        self._opened: ObjectStore | None = None
        self._making_ready: asyncio.Task[ObjectStore] | None = None

    def prepare(self) -> None:
        """Begin to open and probe the store before anybody asks for it. A failure is only logged."""
        if self._making_ready is None:
            self._begin().add_done_callback(_say_failure)

    async def get(self) -> ObjectStore:
        """Return the store. Raises what opening or probing it raised; a caller that waits behind that tries again."""
        async with self._lock:
            task = self._making_ready
            if task is None or (task.done() and (task.cancelled() or task.exception())):
                task = self._begin()
            # If this caller is cancelled, the next one gets the result.
            return await asyncio.shield(task)

    async def close(self) -> None:
        if self._making_ready is not None:
            self._making_ready.cancel()
            await asyncio.wait({self._making_ready})
        await self._stack.aclose()

    def _begin(self) -> asyncio.Task[ObjectStore]:
        self._making_ready = asyncio.create_task(self._make_ready(), name="store")
        return self._making_ready

    async def _make_ready(self) -> ObjectStore:
        if self._opened is None:
            self._opened = await self._stack.enter_async_context(open_store(self._settings, limiter=self._limiter))
        capabilities = await self._opened.probe()
        log.info(
            "store.probed",
            destination=self._settings.destination,
            conditional_put=capabilities.conditional_put,
            integrity=capabilities.integrity,
        )
        # To make a client, far more is parsed than is kept.
        await asyncio.to_thread(priority.malloc_trim)
        # What is kept stays for good. The garbage collector would look at it again and again, 57 ms of the event loop
        # each time.
        gc.freeze()
        return self._opened


def _say_failure(task: asyncio.Task[ObjectStore]) -> None:
    error = None if task.cancelled() else task.exception()
    if isinstance(error, KeepstepError):
        log.warning("store.not_ready", kind=error.kind.value, error=str(error), hint=error.hint)
    elif error is not None:
        log.error("store.not_ready", exc_info=error)

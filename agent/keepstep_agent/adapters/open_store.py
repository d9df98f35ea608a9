"""Chooses the store for a destination by its scheme.

The modules that a store needs are loaded in a thread, so that the event loop is not blocked: for S3, botocore takes
seconds under a small CPU limit. Opening sends no request; call `probe` to learn what the store enforces.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

from keepstep_agent.adapters.rate_limit import RateLimiter
from keepstep_agent.core.errors import ErrorKind, KeepstepError
from keepstep_agent.core.settings.values import StoreSettings
from keepstep_agent.ports import ObjectStore


@asynccontextmanager
async def open_store(settings: StoreSettings, *, limiter: RateLimiter | None = None) -> AsyncIterator[ObjectStore]:
    """Open the store for `settings.destination`; close it at the end. Raises BAD_CONFIGURATION for other schemes."""
    thread = ThreadPoolExecutor(1, thread_name_prefix="keepstep-store-opening")
    try:
        store = await asyncio.get_running_loop().run_in_executor(thread, _make, settings, limiter or RateLimiter())
    finally:
        thread.shutdown(wait=False)
    try:
        yield store
    finally:
        await store.close()


def load_modules(destination: str) -> None:
    """Import what `open_store` needs for this destination. Blocks."""
    _opener(destination)
    from keepstep_agent.adapters.checksum import crc64nvme

    crc64nvme(b"")  # loads its library


def _make(settings: StoreSettings, limiter: RateLimiter) -> ObjectStore:
    load_modules(settings.destination)
    return _opener(settings.destination)(settings, limiter)


def _opener(destination: str) -> Callable[[StoreSettings, RateLimiter], ObjectStore]:
    # Imported here: an agent with one store must not load the other, and none on the event loop.
    match destination.partition("://")[0]:
        case "s3":
            from keepstep_agent.adapters.s3.store import open_s3_store

            # In a loop of its own, because making a client parses megabytes. A client binds to the loop of its first
            # request.
            return lambda settings, limiter: asyncio.run(open_s3_store(settings, limiter))
        case "file":
            from keepstep_agent.adapters.file_store.store import FilesystemStore

            return FilesystemStore
        case _:
            raise KeepstepError(
                ErrorKind.BAD_CONFIGURATION,
                f"{destination!r} is not a destination that Keepstep supports",
                hint="write it as s3://bucket/prefix or file:///absolute/path",
            )

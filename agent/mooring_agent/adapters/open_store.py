"""Chooses the store for a destination by its scheme.

Owns that choice only. Opening makes no request: whoever needs to know what the store enforces calls `probe`.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from mooring_agent.adapters.rate_limit import RateLimiter
from mooring_agent.core.errors import ErrorKind, MooringError
from mooring_agent.core.settings import StoreSettings
from mooring_agent.ports import ObjectStore


@asynccontextmanager
async def open_store(settings: StoreSettings, *, limiter: RateLimiter | None = None) -> AsyncIterator[ObjectStore]:
    """The store for `settings.destination`, closed at the end. BAD_CONFIGURATION for a scheme that we do not know."""
    limiter = limiter or RateLimiter()
    store: ObjectStore
    match settings.destination.partition("://")[0]:
        case "s3":
            # Both are imported here: an idle agent opens neither and a file:/// one no S3, which with botocore is a
            # third of a second and 30 MB.
            from mooring_agent.adapters.s3.store import open_s3_store

            store = await open_s3_store(settings, limiter)
        case "file":
            from mooring_agent.adapters.filesystem_store import FilesystemStore

            store = FilesystemStore(settings, limiter)
        case _:
            raise MooringError(
                ErrorKind.BAD_CONFIGURATION,
                f"{settings.destination!r} is no destination that Mooring knows",
                hint="write it as s3://bucket/prefix or file:///absolute/path",
            )
    try:
        yield store
    finally:
        await store.close()

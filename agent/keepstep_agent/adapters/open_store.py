"""Chooses the store for a destination by its scheme.

The modules that a store needs are loaded in a thread, so that the event loop is not blocked: for S3, botocore takes
seconds under a small CPU limit. Opening sends no request; call `probe` to learn what the store enforces.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Final

from keepstep_agent.adapters.rate_limit import RateLimiter
from keepstep_agent.core.errors import ErrorKind, KeepstepError, StoreError
from keepstep_agent.core.settings.values import StoreSettings
from keepstep_agent.ports import ObjectStore

_OPENING_SECONDS: Final = 120.0
"""How long it may take to load a library and read the files that it is set up with. One of them may be in a home
directory whose server does not answer."""
_HANGING: Final[list["Future[ObjectStore]"]] = []
"""Tries that were given up. Each has a thread, which nobody can end."""


@asynccontextmanager
async def open_store(settings: StoreSettings, *, limiter: RateLimiter | None = None) -> AsyncIterator[ObjectStore]:
    """Open the store for `settings.destination`; close it at the end.

    Raises KeepstepError(BAD_CONFIGURATION) for other schemes, and StoreError(TIMED_OUT).
    """
    _HANGING[:] = [opening for opening in _HANGING if not opening.done()]
    if _HANGING:
        raise _late(settings, "is not opened while an earlier try hangs")
    thread = ThreadPoolExecutor(1, thread_name_prefix="keepstep-store-opening")
    opening = thread.submit(_make, settings, limiter or RateLimiter())
    try:
        async with asyncio.timeout(_OPENING_SECONDS):
            store = await asyncio.wrap_future(opening)
    except TimeoutError as error:
        _HANGING.append(opening)
        raise _late(settings, f"was not opened within {_OPENING_SECONDS:.0f} s") from error
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
    try:
        load_modules(settings.destination)
        return _opener(settings.destination)(settings, limiter)
    except TimeoutError as error:
        # Of a file. A future would forget which.
        raise _late(settings, f"cannot be opened: {error}") from error


def _late(settings: StoreSettings, why: str) -> StoreError:
    return StoreError(
        ErrorKind.TIMED_OUT,
        f"{settings.destination} {why}",
        hint="its library or a file that it reads, such as ~/.aws/config, lies on a disk that does not answer",
    )


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

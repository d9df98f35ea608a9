"""Keeps a destination to one `keepstep run` at a time, by a lease that the living run renews. docs/design/0025.

Two runs would resume from each other's checkpoints: the higher step wins, whoever saved it. Invariants: no lease is
taken from a run that renews it, unless a person says so; one that nobody renews any more holds up nobody for longer
than `EXPIRY_SECONDS`, and an earlier life on the same volume holds up nobody at all.
"""

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

import structlog

from keepstep_agent.adapters.volume.identity import volume_id
from keepstep_agent.catalog.object_reads import DAMAGE, if_there, read_object
from keepstep_agent.core.errors import PASSING, ErrorKind, KeepstepError, StoreError, printable
from keepstep_agent.core.settings.values import Settings
from keepstep_agent.core.stored.lease import LEASE_BYTES, Lease, decode_lease, encode_lease
from keepstep_agent.core.stored.object_layout import LEASE_CLOCK_KEY, LEASE_KEY
from keepstep_agent.ports import ObjectInfo, StoreWriter

_RENEWAL_SECONDS: Final = 15.0
_RETRY_SECONDS: Final = 2.0
_RENEWAL_TIMEOUT_SECONDS: Final = 10.0
EXPIRY_SECONDS: Final = 45.0
"""A renewal, and two more tries that time out."""
_LOOK_SECONDS: Final = 1.0

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


def lease_of_run(settings: Settings) -> Lease:
    """Return the lease of the `keepstep run` that is this process's parent. Blocks. Raises VolumeError."""
    return Lease(
        volume=volume_id(Path(settings.volume), Path(settings.state_directory)),
        attempt=settings.attempt,
        holder=f"process {os.getppid()} on {socket.gethostname()}",
    )


class RunLease:
    """One run's part in the lease of `store`. Only the node with `renews` writes it; the run's others look at it."""

    def __init__(self, store: StoreWriter, own: Lease, *, renews: bool) -> None:
        self._store = store
        self._own = own
        self._renews = renews

    @asynccontextmanager
    async def held(self, *, take_over: bool) -> AsyncIterator[None]:
        """Take the lease and renew it while the context is. It stays behind for the run's agent, but not by an error.

        Raises KeepstepError(BAD_CONFIGURATION) if another run is alive, unless `take_over`; and StoreError.
        """
        await self._acquire(take_over=take_over)
        renewing = asyncio.create_task(self._keep_renewing(), name="renew lease")
        try:
            yield
        except BaseException:
            renewing.cancel()
            with suppress(StoreError):
                await self.release()
            raise
        finally:
            renewing.cancel()

    async def renew(self) -> Lease | None:
        """Renew the lease; if another run has taken it, return that one's. Raises StoreError."""
        other = await self._other()
        if other is None:
            await self._store.put(LEASE_KEY, encode_lease(self._own))
        return other

    async def release(self) -> None:
        """Give the lease back, if it is this run's. Raises StoreError."""
        if self._renews and await self._other() is None:
            await self._store.delete(LEASE_KEY)

    async def _acquire(self, *, take_over: bool) -> None:
        status = await if_there(self._store.head(LEASE_KEY))
        other = await self._other()
        if status is not None and other is not None:
            if take_over:
                _log.warning("run.takes_over", holder=printable(other.holder))
            else:
                await self._wait_for_expiry(status, other)
        if not self._renews:
            return
        # Only where nothing is there can a store decide, and only once it was asked whether it can.
        decides = status is None and (await self._store.probe()).conditional_put
        is_ours = await self._write(if_absent=decides)
        if not decides and (other is not None or status is None):
            # Another start may have waited for the same moment. The last one that wrote has it.
            await asyncio.sleep(_LOOK_SECONDS)
            is_ours = await self._read() == self._own
        if not is_ours:
            if faster := await self._other():
                raise _another_run(faster)
            await self._store.put(LEASE_KEY, encode_lease(self._own))

    async def _write(self, *, if_absent: bool) -> bool:
        """Write the lease; whether it is this run's now."""
        try:
            await self._store.put(LEASE_KEY, encode_lease(self._own), if_absent=if_absent)
        except StoreError as error:
            # Whether the write was refused or is in doubt, what is there says who was first.
            if error.kind is not ErrorKind.ALREADY_EXISTS and error.kind not in PASSING:
                raise
        return await self._read() == self._own

    async def _wait_for_expiry(self, status: ObjectInfo, other: Lease) -> None:
        """Wait until the other run's lease is given back or expired. Raises KeepstepError if a run renews it."""
        # By the store's clock alone.
        age_seconds = await store_time(self._store) - status.modified_at
        left_seconds = EXPIRY_SECONDS - age_seconds
        if left_seconds > 0:
            _log.warning("run.waits_for_lease", holder=printable(other.holder), at_most_seconds=round(left_seconds))
        deadline = asyncio.get_running_loop().time() + left_seconds
        # The last look comes after the deadline.
        while (now := await if_there(self._store.head(LEASE_KEY))) == status:
            if asyncio.get_running_loop().time() >= deadline:
                return
            await asyncio.sleep(_LOOK_SECONDS)
        if now is not None and (alive := await self._other()):
            raise _another_run(alive)

    async def _keep_renewing(self) -> None:
        if self._renews:
            # Another run's lease is told by the agent, which goes on.
            await renew_until_cancelled(self.renew, lambda other: None)

    async def _other(self) -> Lease | None:
        """Return the lease if another run has it."""
        found = await self._read()
        return None if found is None or found.is_of_same_run(self._own) else found

    async def _read(self) -> Lease | None:
        """Return the lease; None if there is none, or one that nobody can read."""
        try:
            return await if_there(read_object(self._store, LEASE_KEY, decode_lease, limit_bytes=LEASE_BYTES))
        except StoreError as error:
            if error.kind not in DAMAGE:
                raise
            return None


async def store_time(store: StoreWriter) -> float:
    """Return what the store's clock says, in unix seconds: it dates what is written now. Raises StoreError."""
    await store.put(LEASE_CLOCK_KEY, b"")
    return (await store.head(LEASE_CLOCK_KEY)).modified_at


async def renew_until_cancelled(renew: Callable[[], Awaitable[Lease | None]], tell: Callable[[Lease], None]) -> None:
    """Call `renew` again and again, and `tell` with the lease of another run that it returns."""
    while True:
        try:
            async with asyncio.timeout(_RENEWAL_TIMEOUT_SECONDS):
                other = await renew()
        except (KeepstepError, TimeoutError) as error:
            _log.info("run.lease_not_renewed", error=str(error) or "the store did not answer in time")
            await asyncio.sleep(_RETRY_SECONDS)
            continue
        if other is not None:
            tell(other)
        await asyncio.sleep(_RENEWAL_SECONDS)


def _another_run(lease: Lease) -> KeepstepError:
    return KeepstepError(
        ErrorKind.BAD_CONFIGURATION,
        f"another run is alive at this destination: {printable(lease.holder)}",
        hint="wait until it has ended, give each run a destination of its own, or add --take-over if that run is to be "
        "replaced; the nodes of one training need the same --attempt, and a --node-rank each",
    )

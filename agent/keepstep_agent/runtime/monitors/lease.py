"""Renews the lease by which a `keepstep run` keeps other runs out of its destination. docs/design/0025.

Nothing waits for it. If a person has let another run take over, or none could tell in time, one line says so: this
agent goes on, because what its program saves must not be lost.
"""

import asyncio
from typing import Final

import structlog

from keepstep_agent.core.errors import printable
from keepstep_agent.core.stored.lease import Lease
from keepstep_agent.restore.run_lease import RunLease, renew_until_cancelled
from keepstep_agent.runtime.work.ready_store import ReadyStore

# The process has two seconds to close in, and SIGKILL may be near.
_LAST_WORDS_SECONDS: Final = 0.5

log = structlog.get_logger("keepstep.run")


class LeaseRenewer:
    """`renew` runs for as long as the agent does."""

    def __init__(self, store: ReadyStore, own: Lease) -> None:
        self._store = store
        self._own = own
        self._told = ""

    async def renew(self) -> None:
        """Renew the lease until cancelled."""
        await renew_until_cancelled(self._renew_once, self._tell)

    async def _renew_once(self) -> Lease | None:
        return await (await self._lease()).renew()

    def _tell(self, other: Lease) -> None:
        if other.holder != self._told:
            self._told = other.holder
            log.error(
                "run.another_run",
                holder=printable(other.holder),
                hint="another run has taken this destination: end one of the two, because each resumes from what the "
                "other saves",
            )

    async def last_words(self) -> None:
        """Give the lease back. Takes only a moment, or gives up: it then expires."""
        try:
            async with asyncio.timeout(_LAST_WORDS_SECONDS):
                await (await self._lease()).release()
        except Exception as error:
            # Whatever it is, the agent exits with its own code.
            log.info("run.lease_left", error=str(error) or "no time left")

    async def _lease(self) -> RunLease:
        return RunLease(await self._store.get(), self._own, renews=True)

"""What the agent's own page shows beside the agent's life: the run's other agents, and what is committed.

It is read from the store when somebody looks, at most once a minute, and only a bounded part of it.
"""

import asyncio
from dataclasses import dataclass, replace
from typing import Final

from keepstep_agent.catalog.damage import damaged_saves
from keepstep_agent.catalog.ledger import read_ledger
from keepstep_agent.catalog.markers import newest_of_run
from keepstep_agent.core.errors import KeepstepError
from keepstep_agent.core.policies.restore_choice import CommittedSave
from keepstep_agent.core.stored.ledger import AgentLife
from keepstep_agent.runtime.work.ready_store import ReadyStore

_BETWEEN_READS_SECONDS: Final = 60.0
_READ_SECONDS: Final = 10.0
_MOST_BYTES: Final = 256 * 1024
"""Decoded, it takes some megabytes of the agent's memory, once somebody has looked."""
_MOST_COMMITTED: Final = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSeen:
    """`lives` of the newest part of the ledger, and the newest committed saves; all of them if `all_listed`.

    `damaged`: those that a restore has found so. `problem`: why they are older than they should be.
    """

    lives: tuple[AgentLife, ...] = ()
    committed: tuple[CommittedSave, ...] = ()
    all_listed: bool = False
    damaged: frozenset[str] = frozenset()
    problem: str = ""


class WholeRun:
    """Keeps what was read last."""

    def __init__(self, store: ReadyStore) -> None:
        self._store = store
        self._seen = RunSeen()
        self._read_at = float("-inf")
        self._one_at_a_time = asyncio.Lock()

    async def look(self) -> RunSeen:
        """Return what is known, read anew if that was long ago. Never raises, and takes a bounded time."""
        now = asyncio.get_running_loop().time()
        if now < self._read_at + _BETWEEN_READS_SECONDS or self._one_at_a_time.locked():
            return self._seen
        async with self._one_at_a_time:
            self._read_at = now
            try:
                async with asyncio.timeout(_READ_SECONDS):
                    self._seen = await self._read()
            except (KeepstepError, TimeoutError) as error:
                problem = str(error) or "the store does not answer in time"
                self._seen = replace(self._seen, problem=problem)
        return self._seen

    async def _read(self) -> RunSeen:
        store = await self._store.get()
        ledger = await read_ledger(store, most_bytes=_MOST_BYTES)
        committed, all_listed = await newest_of_run(store, "", most=_MOST_COMMITTED)
        damaged = await damaged_saves(store)
        return RunSeen(lives=ledger.lives, committed=committed, all_listed=all_listed, damaged=damaged)

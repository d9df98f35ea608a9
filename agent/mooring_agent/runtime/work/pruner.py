"""Applies the retention settings after a commit, and removes leftovers if these settings keep all checkpoints.

`core.policies.retention` decides what may be deleted.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path

import structlog

from mooring_agent.adapters.records import recorded_save
from mooring_agent.catalog.pruning import prune, remove_litter
from mooring_agent.core.agent.commands import Prune
from mooring_agent.core.agent.events import Committed, Event, Pruned
from mooring_agent.core.agent.state import State
from mooring_agent.core.errors import MooringError
from mooring_agent.core.settings.values import RetentionSettings
from mooring_agent.ports import Clock, StoreWriter
from mooring_agent.runtime.work.ready_store import ReadyStore
from mooring_api.names import RESUMED

log = structlog.get_logger("mooring.pruner")


class Pruner:
    """Prunes, but not what is being uploaded or was just committed. `state` returns the current state."""

    def __init__(self, *, state: Callable[[], State], clock: Clock, state_directory: Path) -> None:
        self._state = state
        self._clock = clock
        self._state_directory = state_directory

    async def prune(self, store: StoreWriter, command: Prune) -> Pruned:
        state = self._state()
        newest = (state.newest_committed, state.newest_snapshot)
        report = await prune(
            store,
            state.settings.retention,
            now=self._clock.now(),
            resumed_from=recorded_save(self._state_directory, RESUMED),
            live=[checkpoint.info.save for checkpoint in state.unfinished.values()],
            # Nobody may have pruned the newest of each kind, so a listing without it is incomplete.
            known=[checkpoint.info.save for checkpoint in newest if checkpoint],
        )
        deleted = len(report.plan.deletions)
        if report.plan.refused:
            log.warning("retention.refused", reason=report.plan.refused)
        elif deleted:
            log.info("retention.pruned", saves=deleted, freed_bytes=report.freed_bytes)
        return Pruned(at=self._clock.now(), work=command.work)


class LeftoverRemover:
    """Removes old resume pins and the remains of killed probes, once, if pruning is off and so does not do it.

    `hear` is the engine's listener; `watch` runs for as long as the agent does. The removal follows the first commit
    and is made by the agent with rank 0: the destination then works, and one agent of the job is enough.
    """

    def __init__(self, store: ReadyStore, clock: Clock, settings: RetentionSettings) -> None:
        self._store = store
        self._clock = clock
        self._settings = settings
        self._committed = asyncio.Event()

    def hear(self, state: State, event: Event) -> None:
        if isinstance(event, Committed) and not state.termination.noticed:
            checkpoint = state.checkpoints.get(event.work.save)
            if checkpoint is not None and 0 in checkpoint.contributions:
                self._committed.set()

    async def watch(self) -> None:
        if not self._settings.keep_last:
            await self._committed.wait()
            await self._remove()
        await asyncio.Event().wait()

    async def _remove(self) -> None:
        try:
            removed = await remove_litter(await self._store.get(), self._settings, now=self._clock.now())
        except MooringError as error:
            # Credentials that may not delete are enough for everything else.
            log.info("leftovers.not_removed", error=str(error), hint=error.hint)
            return
        if removed:
            log.info("leftovers.removed", objects=removed)

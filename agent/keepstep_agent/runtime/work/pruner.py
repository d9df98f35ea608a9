"""Applies the retention settings after a commit, and removes leftovers if these settings keep all checkpoints.

Most commits are followed by a prune of the newest saves, which lists little. A whole prune, which also finds what was
never committed, follows the first commit of the agent's life, and another one from time to time.

`core.policies.retention` decides what may be deleted.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Final

import structlog

from keepstep_agent.adapters.records import recorded_save
from keepstep_agent.catalog.markers import SaveTimes
from keepstep_agent.catalog.pruning import PruneReport, prune, remove_litter
from keepstep_agent.catalog.recent_pruning import prune_recent
from keepstep_agent.core.agent.commands import Prune
from keepstep_agent.core.agent.events import Committed, Event, Pruned
from keepstep_agent.core.agent.state import State
from keepstep_agent.core.errors import PASSING, KeepstepError
from keepstep_agent.core.policies.retention.horizon import Horizon
from keepstep_agent.core.settings.values import RetentionSettings
from keepstep_agent.ports import Clock, StoreWriter
from keepstep_agent.runtime.work.ready_store import ReadyStore
from keepstep_api.names import RESUMED

log = structlog.get_logger("keepstep.pruner")


_WHOLE_PRUNE_COMMITS: Final = 500
"""How many commits may follow a whole prune before the next one."""
_WHOLE_PRUNES_PER_ORPHAN_AGE: Final = 4
"""So what was never committed is deleted when it is at most a quarter older than it has to be."""
_BETWEEN_REMOVALS_SECONDS: Final = 6 * 3600.0
"""Where all checkpoints are kept: meanwhile 256 pods write no more objects of the ledger than readers take."""


class Pruner:
    """Prunes, but not what is being uploaded or was just committed. `state` returns the current state."""

    def __init__(self, *, state: Callable[[], State], clock: Clock, state_directory: Path) -> None:
        self._state = state
        self._clock = clock
        self._state_directory = state_directory
        # None: the next prune is a whole one.
        self._horizon: Horizon | None = None
        self._times = SaveTimes()
        self._whole_at = 0.0
        self._commits = 0

    async def prune(self, store: StoreWriter, command: Prune) -> Pruned:
        # After a failure or a refusal, what the last whole prune saw may no longer be true.
        horizon, self._horizon = self._horizon, None
        report = await self._prune(store, horizon)
        deleted = len(report.plan.deletions)
        if report.plan.refused:
            log.warning("retention.refused", reason=report.plan.refused)
        else:
            self._horizon = report.horizon
        if deleted:
            log.info("retention.pruned", saves=deleted, freed_bytes=report.freed_bytes)
        if report.reductions:
            log.info("retention.weights_only", saves=[one.committed.save for one in report.reductions])
        return Pruned(at=self._clock.now(), work=command.work)

    async def _prune(self, store: StoreWriter, horizon: Horizon | None) -> PruneReport:
        state, now = self._state(), self._clock.now()
        retention = state.settings.retention
        # Nobody may have pruned the newest of each kind, so a listing without it is incomplete.
        newest = [one for one in (state.newest_committed, state.newest_snapshot) if one]
        # Those that wait unread are not known further, and may have objects too.
        live = [*(checkpoint.info.save for checkpoint in state.unfinished.values()), *state.unread]
        resumed_from = recorded_save(self._state_directory, RESUMED)
        if horizon is not None and not self._whole_is_due(retention, now):
            # The last one may be below the horizon, because a run may fall back. Where rank 0 is elsewhere, the agent
            # there prunes.
            # The last ones of trainings that have ended may be below for good.
            ordered = sorted(state.last_committed.values(), key=lambda one: one.sequence)
            last = [one for one in ordered if one is ordered[-1] or one.info.step >= horizon.step]
            own = [one.info for one in (*newest, *last) if 0 in one.contributions]
            recent = await prune_recent(
                store,
                retention,
                horizon,
                series={info.name if info.is_snapshot else "" for info in own},
                now=now,
                resumed_from=resumed_from,
                live=live,
                known={info.save for info in own},
                times=self._times,
            )
            if recent is not None:
                self._commits += 1
                return recent
        known = [checkpoint.info.save for checkpoint in newest]
        report = await prune(
            store, retention, now=now, resumed_from=resumed_from, live=live, known=known, times=self._times
        )
        self._whole_at, self._commits = now, 0
        return report

    def _whole_is_due(self, retention: RetentionSettings, now: float) -> bool:
        return (
            self._commits >= _WHOLE_PRUNE_COMMITS
            or now - self._whole_at >= retention.orphan_age_seconds / _WHOLE_PRUNES_PER_ORPHAN_AGE
        )


class LeftoverRemover:
    """Removes old resume pins and the remains of killed probes, and merges the ledger, if pruning is off.

    `hear` is the engine's listener; `watch` runs for as long as the agent does. The removal follows the first commit
    and is made by the agent with rank 0: the destination then works, and one agent of the job is enough. It is made
    again every six hours, after a commit, unless the store refused it.
    """

    def __init__(
        self,
        store: ReadyStore,
        clock: Clock,
        settings: RetentionSettings,
        *,
        between_removals_seconds: float = _BETWEEN_REMOVALS_SECONDS,
    ) -> None:
        self._store = store
        self._clock = clock
        self._settings = settings
        self._between_removals_seconds = between_removals_seconds
        self._committed = asyncio.Event()

    def hear(self, state: State, event: Event) -> None:
        if isinstance(event, Committed) and not state.termination.noticed:
            checkpoint = state.checkpoints.get(event.work.save)
            if checkpoint is not None and 0 in checkpoint.contributions:
                self._committed.set()

    async def watch(self) -> None:
        wanted = not self._settings.keep_last
        while wanted:
            await self._committed.wait()
            wanted = await self._remove()
            await asyncio.sleep(self._between_removals_seconds)
            self._committed.clear()
        await asyncio.Event().wait()

    async def _remove(self) -> bool:
        """Return whether another removal may succeed."""
        try:
            removed = await remove_litter(await self._store.get(), self._settings, now=self._clock.now())
        except KeepstepError as error:
            # Credentials that may not delete are enough for everything else.
            log.info("leftovers.not_removed", error=str(error), hint=error.hint)
            return error.kind in PASSING
        if removed:
            log.info("leftovers.removed", objects=removed)
        return True

"""Applies the retention settings after a commit. What may be deleted is `core.retention`'s word, not ours."""

from collections.abc import Callable
from pathlib import Path

import structlog

from mooring_agent.adapters.records import resumed_from
from mooring_agent.catalog.pruning import prune
from mooring_agent.core.commands import Prune
from mooring_agent.core.events import Pruned
from mooring_agent.core.state import State
from mooring_agent.ports import Clock, ObjectStore

log = structlog.get_logger("mooring.pruner")


class Pruner:
    """`state` gives the state now: what is being uploaded, or was just committed, must not be touched."""

    def __init__(self, *, state: Callable[[], State], clock: Clock, state_directory: Path) -> None:
        self._state = state
        self._clock = clock
        self._state_directory = state_directory

    async def prune(self, store: ObjectStore, command: Prune) -> Pruned:
        state = self._state()
        newest = state.newest_committed()
        report = await prune(
            store,
            state.settings.retention,
            now=self._clock.now(),
            resumed_from=resumed_from(self._state_directory),
            live=[checkpoint.info.save for checkpoint in state.unfinished()],
            # Only what nobody may have pruned: a listing without it has shrunk.
            known=[newest.info.save] if newest else [],
        )
        deleted = len(report.plan.deletions)
        if report.plan.refused:
            log.warning("retention.refused", reason=report.plan.refused)
        elif deleted:
            log.info("retention.pruned", saves=deleted, freed_bytes=report.freed_bytes)
        return Pruned(at=self._clock.now(), work=command.work, deleted=deleted)

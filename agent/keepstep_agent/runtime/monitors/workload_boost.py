"""Keeps Kueue informed how cheap this run is to preempt, by the priority boost of its Workload.

Nothing in the agent waits for it. At most one change a minute is told, and what goes wrong is logged once and tried
again more and more seldom.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from typing import Final

import structlog

from keepstep_agent.core.agent.state import State
from keepstep_agent.core.errors import ClusterError
from keepstep_agent.core.policies.priority_boost import priority_boost
from keepstep_agent.core.settings.values import Settings
from keepstep_agent.ports import Clock, Workload

_BETWEEN_LOOKS_SECONDS: Final = 60.0
_LONGEST_PAUSE_SECONDS: Final = 3600.0
_USUAL_SECONDS: Final = 1800.0
"""How old a recovery point gets, until a run has shown that itself."""
_LAST_WORDS_SECONDS: Final = 0.5

log = structlog.get_logger("keepstep.cluster")


class WorkloadBoost:
    """`keep` runs for as long as the agent does."""

    def __init__(
        self,
        *,
        workload: Workload,
        state: Callable[[], State],
        clock: Clock,
        between_looks_seconds: float = _BETWEEN_LOOKS_SECONDS,
    ) -> None:
        self._workload = workload
        self._state = state
        self._clock = clock
        self._between_looks_seconds = between_looks_seconds
        self._told: int | None = None

    async def keep(self) -> None:
        """Set the boost whenever it is another one, until cancelled."""
        problem, pause_seconds = "", self._between_looks_seconds
        while True:
            wanted = self._wanted()
            try:
                if wanted is not None and wanted != self._told:
                    await self._workload.boost(wanted)
                    self._told = wanted
                problem, pause_seconds = "", self._between_looks_seconds
            except ClusterError as error:
                if str(error) != problem:
                    problem = str(error)
                    log.warning("kueue.not_told", error=problem, hint=error.hint)
                pause_seconds = min(_LONGEST_PAUSE_SECONDS, 2 * pause_seconds)
            await asyncio.sleep(pause_seconds)

    async def last_words(self) -> None:
        """Take the boost back: a job that waits in the queue has nothing cheap to lose. A moment, or it gives up."""
        if not self._told:
            return
        try:
            async with asyncio.timeout(_LAST_WORDS_SECONDS):
                await self._workload.boost(0)
        except (TimeoutError, ClusterError) as error:
            log.info("kueue.boost_left", boost=self._told, error=str(error) or "no time left")

    def _wanted(self) -> int | None:
        """Return the boost by what is uncommitted now; None if nothing is to be said."""
        state = self._state()
        recovery_points = [one.taken_at for one in (state.newest_committed, state.newest_snapshot) if one]
        if not recovery_points or state.termination.noticed:
            return None
        plan = state.save_requests.plan(state.settings.objective)
        wanted_seconds = plan.objective.recovery_point_seconds if plan else 0.0
        return priority_boost(
            state.settings.cluster.priority_boost,
            uncommitted_seconds=self._clock.now() - max(recovery_points),
            usual_seconds=wanted_seconds or state.save_requests.history.oldest_seconds or _USUAL_SECONDS,
        )


@contextlib.asynccontextmanager
async def workload_boost(
    settings: Settings, *, state: Callable[[], State], clock: Clock, executor: Executor
) -> AsyncIterator[WorkloadBoost | None]:
    """Give what tells Kueue while the context is open; None if the settings ask for none, or another pod tells it."""
    cluster = settings.cluster
    is_reachable = cluster.cluster_events and cluster.kubernetes_host and (cluster.job_uid or cluster.pod_uid)
    if not cluster.priority_boost or settings.node_rank or not is_reachable:
        yield None
        return
    # Imported here, because most agents do not report to a cluster.
    from keepstep_agent.adapters.kubernetes import KueueWorkload

    workload = KueueWorkload(cluster, executor)
    try:
        yield WorkloadBoost(workload=workload, state=state, clock=clock)
    finally:
        await workload.close()

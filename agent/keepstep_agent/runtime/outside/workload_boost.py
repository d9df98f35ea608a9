"""Keeps Kueue informed how cheap this run is to preempt, by the priority boost of its Workload: a change a minute."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from typing import Final

from keepstep_agent.core.agent.state import State
from keepstep_agent.core.policies.priority_boost import priority_boost
from keepstep_agent.core.settings.values import Settings
from keepstep_agent.ports import Clock, Workload
from keepstep_agent.runtime.outside.outbox import Pace

_BETWEEN_LOOKS_SECONDS: Final = 60.0
PACE: Final = Pace(
    between_seconds=_BETWEEN_LOOKS_SECONDS,
    shortest_pause_seconds=_BETWEEN_LOOKS_SECONDS,
    longest_pause_seconds=3600.0,
)
_USUAL_SECONDS: Final = 1800.0
"""How old a recovery point gets, until a run has shown that itself."""


class WorkloadBoost:
    """The outbox's sender to Kueue."""

    to = "kueue"

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

    async def until_due(self) -> None:
        while True:
            if self._wanted() not in (None, self._told):
                return
            await asyncio.sleep(self._between_looks_seconds)

    async def send(self) -> None:
        wanted = self._wanted()
        if wanted is not None:
            await self._workload.boost(wanted)
            self._told = wanted

    async def send_last(self) -> None:
        """Take the boost back: a job that waits in the queue has nothing cheap to lose."""
        if self._told:
            await self._workload.boost(0)

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

"""Says when the recovery point objective is not kept, why, and what would help; once for each reason."""

import asyncio
import contextlib
from typing import Final

import structlog

from mooring_agent.core.agent.state import State
from mooring_agent.runtime.engine.engine import Engine

_PERIOD_SECONDS: Final = 60.0
_BY_ITSELF: Final = (
    "have the program write its checkpoints more often, or use mooring.protect or a Checkpointer, which save on request"
)
log = structlog.get_logger("mooring.agent")


async def watch_objective(engine: Engine) -> None:
    """Watch until cancelled."""
    said = ""
    while True:
        found = _shortfall(engine.state)
        if found is not None and found[0] != said:
            said, reached_seconds = found
            wanted = engine.state.save_requests.objective(engine.state.settings.objective)
            assert wanted is not None
            log.warning(
                "objective.missed",
                recovery_point_seconds=wanted.recovery_point_seconds,
                reached_seconds=round(reached_seconds, 1),
                hint=said,
            )
        elif found is None and said:
            said = ""
            log.info("objective.kept_again")
        seen = engine.revision
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PERIOD_SECONDS):
                await engine.next_change(seen)


def _shortfall(state: State) -> tuple[str, float] | None:
    """Return what would help, and how old the recovery point gets; None if the objective is kept or there is none."""
    wanted, plan = (
        state.save_requests.objective(state.settings.objective),
        state.save_requests.plan(state.settings.objective),
    )
    if wanted is None or plan is None:
        return None
    if plan.obstacle is not None:
        return plan.obstacle, plan.recovery_point_seconds
    oldest_seconds = state.save_requests.history.oldest_seconds
    if not state.ranks and not state.alive_ranks and oldest_seconds > wanted.recovery_point_seconds:
        return _BY_ITSELF, oldest_seconds
    return None

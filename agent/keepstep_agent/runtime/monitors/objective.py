"""Says when the recovery point objective is not kept, why, and what would help; once for each reason."""

import asyncio
import contextlib
from typing import Final

import structlog

from keepstep_agent.core.agent.state import State
from keepstep_agent.core.policies.recovery_objective import SavePlan
from keepstep_agent.runtime.engine.engine import Engine

_PERIOD_SECONDS: Final = 60.0
_BY_ITSELF: Final = (
    "have the program write checkpoints more often, or use keepstep.protect or a Checkpointer, which save on request"
)
log = structlog.get_logger("keepstep.agent")


async def watch_objective(engine: Engine) -> None:
    """Watch until cancelled."""
    said = ""
    while True:
        plan = engine.state.save_requests.plan(engine.state.settings.objective)
        hint, reached_seconds = ("", 0.0) if plan is None else _shortfall(engine.state, plan)
        if plan is not None and hint and hint != said:
            log.warning(
                "objective.missed",
                recovery_point_seconds=plan.objective.recovery_point_seconds,
                reached_seconds=round(reached_seconds, 1),
                hint=hint,
            )
        elif said and not hint:
            log.info("objective.kept_again")
        said = hint
        seen = engine.revision
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PERIOD_SECONDS):
                await engine.next_change(seen)


def _shortfall(state: State, plan: SavePlan) -> tuple[str, float]:
    """Return what would help, and how old the recovery point gets; an empty text if the objective is kept."""
    if plan.obstacle is not None:
        return plan.obstacle, plan.recovery_point_seconds
    oldest_seconds = state.save_requests.history.oldest_seconds
    if not state.ranks and not state.alive_ranks and oldest_seconds > plan.objective.recovery_point_seconds:
        return _BY_ITSELF, oldest_seconds
    return "", 0.0

"""Tells the core how far the trainers say that they are, and says in the log when they are stuck and go on again."""

from typing import Final

import structlog

from keepstep_agent.core.agent.events import StepSeen
from keepstep_agent.core.policies.progress import StepSign
from keepstep_agent.core.settings.table import spelled
from keepstep_agent.ports import Clock
from keepstep_agent.runtime.engine.engine import Engine
from keepstep_agent.runtime.monitors.ranks import RanksLook
from keepstep_api.step_file import StepRecord

_LEAST_SECONDS: Final = 1.0

log = structlog.get_logger("keepstep.agent")


class StepWatch:
    """Takes what each look at the ranks has found."""

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self._engine = engine
        self._clock = clock
        self._record: StepRecord | None = None
        self._record_at = 0.0
        self._looked_at = 0.0

    async def take(self, look: RanksLook) -> None:
        now = self._clock.now()
        newest = self._sign(look, now)
        self._looked_at = now
        progress = self._engine.state.progress
        was_stuck = progress.stuck
        if newest == progress.newest and was_stuck == self._engine.state.are_trainers_stuck(now):
            return
        await self._engine.submit(StepSeen(at=now, newest=newest))
        if progress.stuck and not was_stuck and newest is not None:
            log.warning(
                "trainer.stuck",
                step=newest.step,
                seconds=round(now - newest.at, 1),
                hint="look at the trainer's log and stacks (py-spy dump); raise "
                f"{spelled('progress.step_timeout')} if it only works for long",
            )
        elif was_stuck and not progress.stuck:
            log.info("trainer.no_longer_stuck", step=None if newest is None else newest.step)

    def seconds_to_next_look(self, calm_seconds: float) -> float:
        """Return when to look again, at the latest in `calm_seconds`: the trainers may be stuck then."""
        timeout_seconds = self._engine.state.settings.progress.step_timeout
        progress = self._engine.state.progress
        if not timeout_seconds or progress.newest is None or progress.stuck:
            return calm_seconds
        left_seconds = progress.newest.at + timeout_seconds - self._clock.now()
        return min(calm_seconds, max(_LEAST_SECONDS, left_seconds))

    def _sign(self, look: RanksLook, now: float) -> StepSign | None:
        """Return the newest sign by the agent's clock, which the wall clock may leave while the agent runs."""
        if look.newest is None:
            self._record = None
            return None
        if look.newest != self._record:
            at = now - look.age_seconds
            # It was written after the last look, whatever the wall clock says.
            self._record_at = at if self._record is None else max(at, self._looked_at)
            self._record = look.newest
        return StepSign(at=self._record_at, step=look.newest.step)

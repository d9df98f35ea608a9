"""Rings for the trainers, by the doorbell's file and by their streams, and undoes a notice when the pod is spared.

A doorbell that cannot be written is said; the agent goes on without it.
"""

from collections.abc import Callable

import structlog

from mooring_agent.adapters.doorbell import Doorbell
from mooring_agent.adapters.rate_limit import RateLimiter
from mooring_agent.core.commands import RingDoorbell
from mooring_agent.core.errors import MooringError
from mooring_agent.core.settings import Settings
from mooring_agent.runtime.presence import Presence
from mooring_api import doorbell

log = structlog.get_logger("mooring.agent")


def bell_ringer(bell: Doorbell, presence: Presence) -> Callable[[RingDoorbell], None]:
    def ring(command: RingDoorbell) -> None:
        try:
            number = bell.ring(deadline_unix=command.deadline, terminating=command.terminating)
        except MooringError as error:
            log.error("doorbell.unwritable", error=str(error), hint=error.hint)
            number = 0
        log.info("doorbell.rung", terminating=command.terminating, deadline=command.deadline, ring=number)
        presence.ring(doorbell.Ring(ring=number, deadline_unix=command.deadline, terminating=command.terminating))

    return ring


def as_before(bell: Doorbell, limiter: RateLimiter, settings: Settings) -> Callable[[], None]:
    """What a termination notice has changed, when the pod is spared."""

    def go_on() -> None:
        limiter.set_rate(settings.transfer.bandwidth_bytes_per_second)
        try:
            bell.forget_termination()
        except MooringError as error:
            log.error("doorbell.unwritable", error=str(error), hint=error.hint)

    return go_on

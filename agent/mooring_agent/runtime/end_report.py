"""What is said the moment the end of the pod is known: what is not durable yet, and what it still takes.

It may be the last that anybody hears: SIGKILL can come long before the deadline that the agent believes in.
"""

from typing import Final

import structlog

from mooring_agent.core import drain
from mooring_agent.core.state import Checkpoint, State
from mooring_agent.runtime.telemetry import say

_LINES: Final = 10

log = structlog.get_logger("mooring.agent")


def say_what_is_open(state: State, source: str, now: float) -> None:
    """One line for machines, and one for people per checkpoint, the newest first."""
    unfinished = list(reversed(state.unfinished()))
    awaits_save = drain.waiting_for_save(state)
    until = drain.deadline(state)
    left_seconds = None if until is None else round(until - now, 1)
    rate = state.goodput.bytes_per_second
    remaining_bytes = sum(checkpoint.remaining_bytes for checkpoint in unfinished)
    log.warning(
        "termination.open",
        source=source,
        seconds_left=left_seconds,
        not_durable=len(unfinished),
        remaining_bytes=remaining_bytes,
        bytes_per_second=round(rate),
        seconds_needed=round(remaining_bytes / rate, 1) if rate else None,
        awaits_save=awaits_save,
        storage_error=state.storage_error,
    )
    if not unfinished and not awaits_save:
        return
    limit = "no deadline" if left_seconds is None else f"{left_seconds} s until SIGKILL, as far as the agent knows"
    say(
        f"mooring: {source}: {limit}; not durable yet: {len(unfinished)} checkpoints, {remaining_bytes} bytes"
        + (f", {remaining_bytes / rate:.1f} s at the measured rate" if rate and remaining_bytes else "")
        + ("; waiting for the trainers' last save" if awaits_save else "")
    )
    for checkpoint in unfinished[:_LINES]:
        say(f"mooring: open: {_describe(state, checkpoint)}")
    if len(unfinished) > _LINES:
        say(f"mooring: open: and {len(unfinished) - _LINES} older ones")


def _describe(state: State, checkpoint: Checkpoint) -> str:
    needed_seconds = drain.needed_seconds(state, checkpoint)
    return (
        f"{checkpoint.info.name} (step {checkpoint.info.step}, {checkpoint.info.kind}) is {checkpoint.phase}, "
        f"{checkpoint.remaining_bytes} of {checkpoint.size_bytes} bytes left"
        + (f", {needed_seconds:.1f} s" if needed_seconds else "")
    )

"""Budget of the volume, what to give up when it runs short, and whether one more save may begin.

kubelet evicts within seconds of the emptyDir's sizeLimit or the node's threshold, so the budget is kept before that.
A just-in-time save is never refused: room for one is reserved whenever a periodic save asks.
"""

from dataclasses import dataclass
from typing import Final

from mooring_agent.core.agent.checkpoint import Checkpoint
from mooring_agent.core.agent.events import SaveBegun
from mooring_agent.core.agent.state import State
from mooring_agent.core.model import Kind, Phase

_RESERVED_SECONDS: Final = 120.0
_PINNED: Final = frozenset({Phase.STAGED, Phase.UPLOADING, Phase.SEALED})


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """`reason` says why not, for people."""

    admitted: bool
    reason: str = ""


def budget_bytes(state: State) -> int | None:
    """What may still be written to the volume; None before the first reading. Never negative."""
    if state.disk is None:
        return None
    settings = state.settings.disk
    threshold_bytes = int(state.disk.total_bytes * settings.eviction_threshold_percent / 100)
    budget = state.disk.free_bytes - threshold_bytes
    if settings.size_limit_bytes:
        budget = min(budget, settings.size_limit_bytes - state.disk.used_bytes)
    return max(0, budget)


def reserve(state: State, begun: SaveBegun) -> None:
    """Keep room for a save that was given leave. A trainer that begins a later step writes no earlier one any more.

    Nothing is kept for what was announced already, should the caller have been slow and gone on without an answer.
    """
    for save in [
        save for save, other in state.begun.items() if other.attempt == begun.attempt and other.step < begun.step
    ]:
        del state.begun[save]
    announced = state.checkpoints.get(begun.save)
    if announced is None or announced.phase is Phase.FAILED:
        state.begun[begun.save] = begun


def drop_overdue(state: State) -> None:
    """Nobody may ever say what became of a save: room is kept for it for a while only.

    What a slow one has written until then shows in the readings of the volume anyway.
    """
    for save in [save for save, begun in state.begun.items() if begun.at + _RESERVED_SECONDS <= state.now]:
        del state.begun[save]


def forecast_bytes(state: State) -> int:
    """Size of the next save, from the last ones; 0 when nothing is known."""
    return max(state.recent_sizes_bytes, default=0)


def admit(state: State, kind: Kind, size_bytes: int) -> Admission:
    """May a save of this size begin? `size_bytes` 0: forecast."""
    budget = budget_bytes(state)
    if kind is Kind.JUST_IN_TIME or budget is None:
        return Admission(admitted=True)
    size = size_bytes or forecast_bytes(state)
    needed = _needed_bytes(state, size)
    if needed <= budget:
        return Admission(admitted=True)
    return Admission(
        admitted=False,
        reason=f"{budget} bytes may still be written to the volume; this save and a just-in-time one need {needed}",
    )


def to_shed(state: State) -> list[Checkpoint]:
    """Superseded checkpoints to give up now, the oldest first; never the newest, the one on the wire, or one all sent.

    Room that is coming, or came since the last reading, counts: else one shortage would be paid for with everything.
    """
    budget = budget_bytes(state)
    if budget is None:
        return []
    shortage = _needed_bytes(state, forecast_bytes(state)) - budget - state.coming_bytes - state.freed_bytes
    chosen: list[Checkpoint] = []
    if shortage <= 0:
        return chosen
    newest_safe = _newest_safe(state)
    for checkpoint in state.unfinished():
        if shortage <= 0 or newest_safe is None or checkpoint.sequence >= newest_safe.sequence:
            break
        if _may_be_shed(state, checkpoint):
            chosen.append(checkpoint)
            shortage -= checkpoint.size_bytes
    return chosen


def _newest_safe(state: State) -> Checkpoint | None:
    """It supersedes all before it. What is only announced may yet turn out to be missing or changed."""
    return next(
        (found for found in reversed(state.checkpoints.values()) if found.durable or found.phase in _PINNED), None
    )


def _may_be_shed(state: State, checkpoint: Checkpoint) -> bool:
    """Whether a superseded checkpoint is not worth its room."""
    if checkpoint.info.kind is not Kind.PERIODIC:
        return False
    if checkpoint.phase is Phase.SEALED:
        # Nothing is left to send: only ranks elsewhere can complete it, and may have given it up.
        committed = state.last_announced_committed()
        return checkpoint.waits_for_ranks and committed is not None and committed.sequence > checkpoint.sequence
    if checkpoint.phase not in (Phase.STAGED, Phase.UPLOADING) or checkpoint.info.save == state.active_upload:
        return False
    # With its last byte sent it is about to be sealed, and gives its room back for nothing lost.
    return checkpoint.remaining_bytes > 0 or len(checkpoint.contributions) < checkpoint.expected_local_ranks


def _needed_bytes(state: State, size_bytes: int) -> int:
    """Room for one save while it is written, one just-in-time save after it, and those that were given leave."""
    being_written = sum(begun.size_bytes for begun in state.begun.values())
    return int(size_bytes * state.settings.disk.peak_factor) + size_bytes + being_written

"""The volume's budget: how much may be written, what to shed when room runs short, and whether a save may begin.

kubelet evicts a pod within seconds once the emptyDir's sizeLimit or the node's threshold is reached, so the budget ends
before that. A just-in-time save is never refused: room for one is reserved whenever a periodic save asks.
"""

from dataclasses import dataclass
from typing import Final

from keepstep_agent.core.agent.checkpoint import Checkpoint
from keepstep_agent.core.agent.events import SaveBegun
from keepstep_agent.core.agent.state import State
from keepstep_agent.core.model import Kind, Phase

_RESERVED_SECONDS: Final = 120.0
_PINNED: Final = frozenset({Phase.STAGED, Phase.UPLOADING, Phase.SEALED})


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """Whether a save may begin. `reason` tells people why not."""

    admitted: bool
    reason: str = ""


def budget_bytes(state: State) -> int | None:
    """Return how many bytes may still be written to the volume; None before the first reading. Never negative."""
    if state.disk is None:
        return None
    settings = state.settings.disk
    threshold_bytes = int(state.disk.total_bytes * settings.eviction_threshold_percent / 100)
    budget = state.disk.free_bytes - threshold_bytes
    if settings.size_limit_bytes:
        budget = min(budget, settings.size_limit_bytes - state.disk.used_bytes)
    return max(0, budget)


def reserve(state: State, begun: SaveBegun) -> None:
    """Reserve room for an admitted save, and end the reservations for earlier steps of the same attempt.

    A trainer that begins a later step has finished writing the earlier ones. Nothing is reserved for a save that is
    already announced: its trainer may have gone on without waiting for the answer.
    """
    for save in [
        save for save, other in state.begun.items() if other.attempt == begun.attempt and other.step < begun.step
    ]:
        del state.begun[save]
    announced = state.checkpoints.get(begun.save)
    if announced is None or announced.phase is Phase.FAILED:
        state.begun[begun.save] = begun


def drop_overdue(state: State) -> None:
    """End reservations that are 120 seconds old, because the outcome of a save may never be reported.

    What a slow save has written by then shows in the readings of the volume.
    """
    for save in [save for save, begun in state.begun.items() if begun.at + _RESERVED_SECONDS <= state.now]:
        del state.begun[save]


def forecast_bytes(state: State) -> int:
    """Return the expected size of the next save: the largest of the last ones, 0 when none is known."""
    return max(state.recent_sizes_bytes, default=0)


def admit(state: State, kind: Kind, size_bytes: int) -> Admission:
    """Decide whether a save of this size may begin. `size_bytes` 0: use the forecast."""
    budget = budget_bytes(state)
    if kind is Kind.JUST_IN_TIME or budget is None:
        return Admission(admitted=True)
    size = size_bytes or forecast_bytes(state)
    needed = _needed_bytes(state, size)
    if needed <= budget:
        return Admission(admitted=True)
    return Admission(
        admitted=False,
        reason=f"{budget} bytes may still be written to the volume; this save and a just-in-time save need {needed}",
    )


def to_shed(state: State) -> list[Checkpoint]:
    """Return the superseded checkpoints to shed now, the oldest first.

    Never the newest, the active upload, or one that is fully sent and waits for no rank. Room that was freed since the
    last reading, or is about to be, counts; otherwise one shortage would shed every checkpoint.
    """
    budget = budget_bytes(state)
    if budget is None:
        return []
    shortage = _needed_bytes(state, forecast_bytes(state)) - budget - state.coming_bytes - state.freed_bytes
    chosen: list[Checkpoint] = []
    if shortage <= 0:
        return chosen
    newest_safe: dict[str, int] = {}
    for checkpoint in state.unfinished.values():
        if shortage <= 0:
            break
        key = checkpoint.info.output_key
        if key not in newest_safe:
            newest_safe[key] = _newest_safe(state, key)
        if checkpoint.sequence < newest_safe[key] and _may_be_shed(state, checkpoint):
            chosen.append(checkpoint)
            shortage -= checkpoint.size_bytes
    return chosen


def _newest_safe(state: State, output_key: str) -> int:
    """Return the sequence of an output directory's newest pinned or durable checkpoint; -1 if there is none.

    It supersedes all before it there. A snapshot supersedes none. A checkpoint that is only announced may still turn
    out to be missing or changed.
    """
    return next(
        (
            found.sequence
            for found in reversed(state.checkpoints.values())
            if not found.info.is_snapshot
            and found.info.output_key == output_key
            and (found.durable or found.phase in _PINNED)
        ),
        -1,
    )


def _may_be_shed(state: State, checkpoint: Checkpoint) -> bool:
    """Whether a superseded checkpoint may be shed to free its room."""
    if checkpoint.info.kind is not Kind.PERIODIC:
        return False
    if checkpoint.phase is Phase.SEALED:
        # Nothing is left to send: only ranks elsewhere can complete it, and they may have given it up.
        committed = state.superseded_by(checkpoint)
        return checkpoint.waits_for_others and committed is not None and committed.sequence > checkpoint.sequence
    if checkpoint.phase not in (Phase.STAGED, Phase.UPLOADING) or checkpoint.info.save == state.active_upload:
        return False
    # Once its last byte is sent it is about to be sealed and to free its room without any loss.
    return checkpoint.remaining_bytes > 0 or len(checkpoint.contributions) < checkpoint.expected_local_ranks


def _needed_bytes(state: State, size_bytes: int) -> int:
    """Return the room for one save while it is written, one just-in-time save after it, and all admitted saves."""
    being_written = sum(begun.size_bytes for begun in state.begun.values())
    return int(size_bytes * state.settings.disk.peak_factor) + size_bytes + being_written

"""What fits in the remaining grace, whom to wait for, and when to leave.

The deadline is the earliest anybody told us. Kubelet gives at least two seconds after our own SIGTERM, even when the
trainer used up all the grace (kuberuntime_container.go), so the deadline never lies before that.
"""

from collections.abc import Iterator
from typing import Final

from mooring_agent.core.agent.checkpoint import Checkpoint
from mooring_agent.core.agent.commands import Exit
from mooring_agent.core.agent.state import State
from mooring_agent.core.model import Kind, Phase

EXIT_NOT_DURABLE: Final = 75
"""EX_TEMPFAIL: the newest checkpoint is not in the bucket, but lies on the volume."""

_FLOOR_AFTER_SIGTERM_SECONDS: Final = 2.0
# Time to write the last line and die by ourselves rather than by SIGKILL.
_EXIT_MARGIN_SECONDS: Final = 0.6
_LAPSES_AFTER_SECONDS: Final = 60.0
_OVER: Final = frozenset({Phase.FAILED, Phase.SHED})


def deadline(state: State) -> float | None:
    """Unix seconds at which SIGKILL comes; None: nobody said."""
    termination = state.termination
    if termination.deadline is None or termination.stop_requested_at is None:
        return termination.deadline
    return max(termination.deadline, termination.stop_requested_at + _FLOOR_AFTER_SIGTERM_SECONDS)


def needed_seconds(state: State, checkpoint: Checkpoint) -> float:
    """How long a checkpoint still takes at the measured rate; 0 while nothing was measured."""
    rate = state.upload_rate.bytes_per_second
    return checkpoint.remaining_bytes / rate if rate > 0 else 0.0


def worth_sending(state: State, checkpoint: Checkpoint) -> bool:
    """Whether an older checkpoint fits before the deadline without touching the newest one's commit reserve."""
    until = deadline(state)
    if not state.termination.noticed or until is None:
        return True
    reserve = state.settings.termination.commit_reserve_seconds
    return state.now + needed_seconds(state, checkpoint) + reserve <= until


def may_read_again(state: State, kind: Kind) -> bool:
    """Whether a sent checkpoint of this kind may be compared with its files once more before it counts as sent.

    Not while the pod ends, nor for the save of its end: that takes longer the more was sent, `needed_seconds` does not
    count it, and a checkpoint that misses the deadline is lost for certain.
    """
    return not state.termination.noticed and kind is not Kind.JUST_IN_TIME


def waiting_for_save(state: State) -> bool:
    """A local rank lives that has not yet announced its just-in-time (or final) save.

    While one lives that has not said which rank it is, they are counted: who died is taken to have announced. Taken
    wrongly, that costs a wait until the last rank is gone or the newest needs the time.
    """
    alive_count = len(state.alive_ranks)
    if state.termination.trainers_gone or not alive_count:
        return False
    last_saves = list(_last_saves(state))
    announced = {rank for checkpoint in last_saves for rank in checkpoint.contributions}
    if state.alive_ranks <= state.ranks.keys():
        # Where one rank writes for all, the others have nothing to announce.
        writers = max((checkpoint.info.world_size for checkpoint in last_saves), default=None)
        owing_ranks = {state.ranks[local_rank] for local_rank in state.alive_ranks} - announced
        return any(writers is None or rank < writers for rank in owing_ranks)
    owing = max(state.termination.most_alive, alive_count)
    return owing > max(len(announced), owing - alive_count)


def newest_possible(state: State) -> Checkpoint | None:
    """The newest that may become durable: nobody who lives can complete one whose ranks died before they announced."""
    return next(
        (
            checkpoint
            for checkpoint in reversed(state.checkpoints.values())
            if checkpoint.phase not in _OVER and _can_be_complete(state, checkpoint)
        ),
        None,
    )


def _can_be_complete(state: State, checkpoint: Checkpoint) -> bool:
    """Whether enough local ranks live that have not announced it; those who do not say which rank they are may be."""
    missing = checkpoint.expected_local_ranks - len(checkpoint.contributions)
    if missing <= 0:
        return True
    may_come = {
        local_rank for local_rank in state.alive_ranks if state.ranks.get(local_rank) not in checkpoint.contributions
    }
    return not state.termination.trainers_gone and len(may_come) >= missing


def _last_saves(state: State) -> Iterator[Checkpoint]:
    """Of this end, in the order of announcement. Saves that were written meanwhile may be announced after them."""
    newest = state.newest()
    # A run that goes on after a final save owes another one.
    final = [newest] if newest is not None and newest.info.kind is Kind.FINAL else []
    for checkpoint in (*state.just_in_time(), *final):
        if checkpoint.sequence >= state.termination.first_sequence and checkpoint.phase not in _OVER:
            yield checkpoint


def expires_at(state: State) -> float | None:
    """When a notice is void: its deadline is long past, and nobody has stopped us. A maintenance can spare a pod."""
    termination = state.termination
    if termination.deadline is None or termination.stop_requested_at is not None:
        return None
    return termination.deadline + _LAPSES_AFTER_SECONDS


def _wait_until(state: State) -> float | None:
    """When waiting for a save must end, so that the newest staged checkpoint still gets out."""
    until = deadline(state)
    if until is None:
        return None
    newest = newest_possible(state)
    needed = needed_seconds(state, newest) if newest and not newest.ended else 0.0
    return until - needed - state.settings.termination.commit_reserve_seconds


def exit_verdict(state: State) -> Exit | None:
    """Leave now, and with what; None: not yet."""
    termination = state.termination
    if termination.stop_requested_at is None or termination.exiting:
        return None
    until = deadline(state)
    if until is not None and state.now >= until - _EXIT_MARGIN_SECONDS:
        return _exit(state)
    wait_until = _wait_until(state)
    if waiting_for_save(state) and (wait_until is None or state.now < wait_until):
        return None
    # Pins and old objects are cleaned up too, when there is time; they are not worth a deadline. What is on the wire of
    # a checkpoint that will not fit holds nobody.
    is_tidying = len(state.in_flight) > len(state.transfers)
    return None if is_tidying or _holder(state) is not None else _exit(state)


def _holder(state: State) -> Checkpoint | None:
    """The newest unfinished checkpoint that is worth staying for."""
    newest = newest_possible(state)
    unfinished = reversed(state.unfinished())
    return next((checkpoint for checkpoint in unfinished if _worth_staying(state, checkpoint, newest)), None)


def _worth_staying(state: State, checkpoint: Checkpoint, newest: Checkpoint | None) -> bool:
    """Whether we can still do something for an unfinished checkpoint."""
    if not _can_be_complete(state, checkpoint):
        return False
    if checkpoint is newest:
        return True
    if checkpoint.phase is Phase.SEALED and checkpoint.waits_for_ranks:
        # Our contribution is stored; the agent that seals last writes the marker.
        return False
    return worth_sending(state, checkpoint)


def next_wake(state: State) -> float | None:
    """The next moment at which the verdict may change by time alone; unix seconds."""
    termination = state.termination
    until = deadline(state)
    if termination.stop_requested_at is None or termination.exiting or until is None:
        return None
    moments = [until - _EXIT_MARGIN_SECONDS]
    wait_until = _wait_until(state)
    if wait_until is not None and waiting_for_save(state):
        moments.append(wait_until)
    # An older one that holds us stops doing so when it no longer fits.
    holder = _holder(state)
    if holder is not None:
        reserve = state.settings.termination.commit_reserve_seconds
        moments.append(until - reserve - needed_seconds(state, holder))
    return min([moment for moment in moments if moment > state.now], default=None)


def _exit(state: State) -> Exit:
    newest = max(state.checkpoints.values(), key=lambda checkpoint: checkpoint.sequence, default=None)
    lost = tuple(
        f"{checkpoint.info.name} (step {checkpoint.info.step}, {checkpoint.info.kind}) is {checkpoint.phase}, "
        f"{checkpoint.durable_bytes} of {checkpoint.size_bytes} bytes durable"
        + (f" ({checkpoint.reason})" if checkpoint.reason else "")
        + f"; its files lie under {state.settings.volume}"
        for checkpoint in sorted(state.checkpoints.values(), key=lambda checkpoint: -checkpoint.sequence)
        if not checkpoint.durable and checkpoint.phase is not Phase.SHED
    )
    durable = newest is None or newest.durable
    return Exit(code=0 if durable else EXIT_NOT_DURABLE, lost=lost)

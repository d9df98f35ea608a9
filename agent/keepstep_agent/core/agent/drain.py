"""What fits in the remaining grace period, which saves to wait for, and when to exit.

The deadline is the earliest of those in the termination notices. Kubelet gives at least two seconds after the agent's
own SIGTERM, even if the trainer used up the whole grace period (kuberuntime_container.go). So the deadline is never
earlier than that.
"""

from collections.abc import Iterator
from typing import Final

from keepstep_agent.core.agent.checkpoint import Checkpoint
from keepstep_agent.core.agent.commands import Exit
from keepstep_agent.core.agent.lifecycle import LOST_PHASES
from keepstep_agent.core.agent.state import State
from keepstep_agent.core.agent.work import TRANSFERS, Operation
from keepstep_agent.core.model import Kind, Phase
from keepstep_agent.core.policies.repeated_deaths import Suspect, is_announcement
from keepstep_api.names import NOT_DURABLE_EXIT_CODE

_FLOOR_AFTER_SIGTERM_SECONDS: Final = 2.0
# Time to write the last log line and exit before SIGKILL.
_EXIT_MARGIN_SECONDS: Final = 0.6
_LAPSES_AFTER_SECONDS: Final = 60.0
# How long a drain without a deadline goes on trying what is refused, as keys may just be renewed; and how long it waits
# for other agents when it has stored all of its own.
_REFUSED_SECONDS: Final = 10.0
_OTHERS_SECONDS: Final = 3600.0


def deadline(state: State) -> float | None:
    """Return when SIGKILL comes, in unix seconds; None if no notice says it."""
    termination = state.termination
    if termination.deadline is None or termination.stop_requested_at is None:
        return termination.deadline
    return max(termination.deadline, termination.stop_requested_at + _FLOOR_AFTER_SIGTERM_SECONDS)


def needed_seconds(state: State, checkpoint: Checkpoint) -> float:
    """Return how long a checkpoint still takes at the measured rate; 0 while nothing was measured."""
    rate = state.upload_rate.bytes_per_second
    return checkpoint.remaining_bytes / rate if rate > 0 else 0.0


def worth_sending(state: State, checkpoint: Checkpoint) -> bool:
    """Whether an older checkpoint fits before the deadline without using the newest one's commit reserve."""
    until = deadline(state)
    if not state.termination.noticed or until is None:
        return True
    reserve = state.settings.termination.commit_reserve_seconds
    return state.now + needed_seconds(state, checkpoint) + reserve <= until


def may_read_again(state: State, kind: Kind) -> bool:
    """Whether a sent checkpoint of this kind may be compared with its files once more before it counts as sent.

    Not after a termination notice, and not for a just-in-time save: the comparison takes longer the more was sent,
    `needed_seconds` does not include it, and a checkpoint that misses the deadline is certainly lost.
    """
    return not state.termination.noticed and kind is not Kind.JUST_IN_TIME


def waiting_for_save(state: State) -> bool:
    """Whether a live local rank has not yet announced its just-in-time (or final) save.

    While a live local rank has not registered which rank it is, the ranks are only counted, and those that died are
    assumed to have announced. If that is wrong, the agent waits until the last rank is gone or the newest checkpoint
    needs the time.
    """
    alive_count = len(state.alive_ranks)
    if state.termination.trainers_gone or not alive_count:
        return False
    last_saves = list(_last_saves(state))
    announced = {rank for checkpoint in last_saves for rank in checkpoint.contributions}
    if state.alive_ranks <= state.ranks.keys():
        # If one rank writes for all, the others have nothing to announce.
        writers = max((checkpoint.info.world_size for checkpoint in last_saves), default=None)
        owing_ranks = {state.ranks[local_rank] for local_rank in state.alive_ranks} - announced
        return any(writers is None or rank < writers for rank in owing_ranks)
    owing = max(state.termination.most_alive, alive_count)
    return owing > max(len(announced), owing - alive_count)


def newest_possible(state: State) -> Checkpoint | None:
    """Return the newest checkpoint that may become durable. One whose ranks died before they announced cannot.

    Nor one that is set aside, as long as anything else is left to do.
    A snapshot only if the newest announced checkpoint needs nothing any more.
    """
    newest = None
    for checkpoint in reversed(state.checkpoints.values()):
        if checkpoint.phase in LOST_PHASES or checkpoint.held_back or not _can_be_complete(state, checkpoint):
            continue
        newest = newest or checkpoint
        if not checkpoint.info.is_snapshot:
            return newest if checkpoint.ended else checkpoint
    return newest


def _can_be_complete(state: State, checkpoint: Checkpoint) -> bool:
    """Whether enough live local ranks may still announce it. One that has not registered counts among them."""
    missing = checkpoint.expected_local_ranks - len(checkpoint.contributions)
    if missing <= 0:
        return True
    may_come = {
        local_rank for local_rank in state.alive_ranks if state.ranks.get(local_rank) not in checkpoint.contributions
    }
    return not state.termination.trainers_gone and len(may_come) >= missing


def may_be_tried(state: State, work: str) -> bool:
    """Whether work that is set aside may be tried again: an agent that was told to stop tries it once and no more."""
    suspect = state.suspects.get(work)
    return suspect is None or not suspect.was_tried_again or state.termination.stop_requested_at is None


def _last_saves(state: State) -> Iterator[Checkpoint]:
    """Yield the last saves of this termination, in the order of announcement.

    They need not be the newest: other saves that were being written may be announced after them.
    """
    newest = state.newest()
    # Only the newest: a run that goes on after a final save owes another one.
    final = [newest] if newest is not None and newest.info.kind is Kind.FINAL else []
    for checkpoint in (*state.just_in_time.values(), *final):
        is_of_this_life = checkpoint.sequence >= state.termination.first_sequence and (
            checkpoint.recorded_at is None or checkpoint.recorded_at >= state.termination.begun_at
        )
        if is_of_this_life and checkpoint.phase not in LOST_PHASES:
            yield checkpoint


def expires_at(state: State) -> float | None:
    """Return when the notice expires (unix seconds): a minute after its deadline, unless the agent was told to stop.

    Not every announced maintenance ends the pod.
    """
    termination = state.termination
    if termination.deadline is None or termination.stop_requested_at is not None:
        return None
    return termination.deadline + _LAPSES_AFTER_SECONDS


def _wait_until(state: State) -> float | None:
    """Return when waiting for a save must end so that the newest checkpoint still becomes durable; None: no limit."""
    until = deadline(state)
    if until is None:
        return None
    newest = newest_possible(state)
    needed = needed_seconds(state, newest) if newest and not newest.ended else 0.0
    return until - needed - state.settings.termination.commit_reserve_seconds


def exit_verdict(state: State) -> Exit | None:
    """Return the command to exit if it is time, else None."""
    termination = state.termination
    if termination.stop_requested_at is None or termination.exiting:
        return None
    until = deadline(state)
    if until is not None and state.now >= until - _EXIT_MARGIN_SECONDS:
        return _exit(state)
    gives_up_at = gives_up_store_at(state)
    if gives_up_at is not None and state.now >= gives_up_at:
        return _exit(state)
    wait_until = _wait_until(state)
    if waiting_for_save(state) and (wait_until is None or state.now < wait_until):
        return None
    # The agent waits for the removal of pins and old objects too, but not beyond the deadline. It does not wait for the
    # transfers of a checkpoint that does not fit.
    is_busy = any(work.operation not in TRANSFERS and work.operation is not Operation.ASK for work in state.in_flight)
    is_tidying = is_busy or state.now < _told_until(state)
    return None if is_tidying or _holder(state) is not None else _exit(state)


def _told_until(state: State) -> float:
    """Return until when the agent stays for those whom it has to tell of commits; 0 if there are none.

    For one try after the last commit. What is not taken by then is told by the next agent on this volume.
    """
    newest_at = state.untold_news.newest_committed_at()
    return 0.0 if newest_at is None else newest_at + state.settings.events.event_timeout_seconds


def gives_up_store_at(state: State) -> float | None:
    """Return when a drain without a deadline ends because work fails and nothing gets further; None if some does.

    A store that takes what is left slowly has no such limit: the program of a run has ended, and its machine stays.
    """
    requested_at, since = state.termination.stop_requested_at, state.standstill.since
    if requested_at is None or deadline(state) is not None or since is None:
        return None
    timeout_seconds = state.settings.termination.drain_timeout_seconds
    if state.standstill.is_refusal:
        timeout_seconds = min(timeout_seconds, _REFUSED_SECONDS)
    return max(requested_at, since) + timeout_seconds


def is_at_standstill(state: State) -> bool:
    """Whether work has failed for a while, with nothing stored meanwhile."""
    since = state.standstill.since
    return state.breaker.is_open or (since is not None and state.now - since >= _REFUSED_SECONDS)


def _gives_up_others_at(state: State, checkpoint: Checkpoint) -> float | None:
    """Return when a drain without a deadline no longer waits for other agents to seal or commit; None if it does not.

    They may have ended without their share of the checkpoint.
    """
    requested_at = state.termination.stop_requested_at
    if requested_at is None or not (checkpoint.phase is Phase.SEALED and checkpoint.waits_for_others):
        return None
    return max(requested_at, checkpoint.sealed_at) + _OTHERS_SECONDS


def _holder(state: State) -> Checkpoint | None:
    """Return the newest unfinished checkpoint that is worth waiting for."""
    newest = newest_possible(state)
    unfinished = reversed(state.unfinished.values())
    return next((checkpoint for checkpoint in unfinished if _worth_staying(state, checkpoint, newest)), None)


def _worth_staying(state: State, checkpoint: Checkpoint, newest: Checkpoint | None) -> bool:
    """Whether the agent can still do something for an unfinished checkpoint."""
    if not _can_be_complete(state, checkpoint) or not may_be_tried(state, checkpoint.info.save):
        return False
    others_until = _gives_up_others_at(state, checkpoint)
    if others_until is not None and state.now >= others_until:
        return False
    if checkpoint is newest:
        return True
    if checkpoint.phase is Phase.SEALED and checkpoint.waits_for_others:
        # Our manifest is stored, and another agent can write the marker.
        return False
    return worth_sending(state, checkpoint)


def next_wake(state: State) -> float | None:
    """Return the next moment (unix seconds) at which the verdict may change by time alone; None if there is none."""
    termination = state.termination
    until = deadline(state)
    if termination.stop_requested_at is None or termination.exiting:
        return None
    told_until = _told_until(state)
    if until is None:
        holder = _holder(state)
        limits = (gives_up_store_at(state), None if holder is None else _gives_up_others_at(state, holder))
        moments = [told_until, *(moment for moment in limits if moment is not None)]
        return min([moment for moment in moments if moment > state.now], default=limits[0])
    moments = [told_until, until - _EXIT_MARGIN_SECONDS]
    wait_until = _wait_until(state)
    if wait_until is not None and waiting_for_save(state):
        moments.append(wait_until)
    # An older checkpoint delays the exit only while it fits before the deadline.
    holder = _holder(state)
    if holder is not None:
        reserve = state.settings.termination.commit_reserve_seconds
        moments.append(until - reserve - needed_seconds(state, holder))
    return min([moment for moment in moments if moment > state.now], default=None)


def _exit(state: State) -> Exit:
    lost = tuple(
        f"{checkpoint.info} is {checkpoint.phase}, "
        f"{checkpoint.durable_bytes} of {checkpoint.size_bytes} bytes durable"
        + (f" ({why})" if (why := _why_not_durable(state, checkpoint)) else "")
        + f"; its files lie under {state.settings.volume}"
        for checkpoint in sorted(state.checkpoints.values(), key=lambda checkpoint: -checkpoint.sequence)
        if not checkpoint.durable and checkpoint.phase is not Phase.SHED
    )
    newest = {(one.info.is_snapshot, one.info.output_key): one for one in state.checkpoints.values()}
    # Checkpoints of earlier agents count too: the journal keeps the newest one.
    nothing_found = () if newest or not state.termination.nothing_found else (state.termination.nothing_found,)
    unread = (f"{one.last.title}: {one}" for work, one in state.suspects.items() if _is_not_taken(state, work, one))
    not_stored = (*_unsaved(state), *unread, *state.not_stored, *nothing_found)
    durable = all(checkpoint.durable for checkpoint in newest.values()) and not not_stored
    # Also if only another node's agent has the notice.
    stopped = state.termination.left or any(one.info.kind is Kind.JUST_IN_TIME for one in _last_saves(state))
    return Exit(code=0 if durable else NOT_DURABLE_EXIT_CODE, lost=(*lost, *not_stored), stopped=stopped)


def _is_not_taken(state: State, work: str, suspect: Suspect) -> bool:
    """Whether a suspect is a save that is not read, or an announcement that is not taken, and no newer one came."""
    newest = state.newest()
    is_newest = newest is None or newest.announced_at < suspect.noted_at
    return work in state.unread or (suspect.is_set_aside and is_announcement(work) and is_newest)


def _why_not_durable(state: State, checkpoint: Checkpoint) -> str:
    """Return what is known to have kept a checkpoint from becoming durable, for people."""
    return checkpoint.problem or ("" if checkpoint.ended else state.storage_error)


def _unsaved(state: State) -> Iterator[str]:
    """Say which step the trainers were asked to save and did not, as far as they told it."""
    termination = state.termination
    if termination.lost_at is not None:
        yield f"step {termination.lost_at}: the trainers left without a save of it"
        return
    if not termination.noticed or any(one.sequence >= termination.noticed_sequence for one in _last_saves(state)):
        return
    # Ranks that are alive were asked too.
    asked = [sign for sign in (state.progress.newest, termination.cut_short) if sign is not None]
    last = max(asked, key=lambda sign: sign.step, default=None)
    saves = (one for one in reversed(state.checkpoints.values()) if _is_save(one, state.training_sequence))
    newest = next(saves, None)
    # A word from before the save does not say how far training went on after it.
    if last is not None and (newest is None or newest.info.step < last.step or last.at < newest.taken_at):
        since = "nothing" if newest is None else f"step {newest.info.step}"
        yield f"step {last.step} or later: the trainers were asked to save it and did not; they announced {since} last"


def _is_save(checkpoint: Checkpoint, first_sequence: int) -> bool:
    is_lost = checkpoint.phase in LOST_PHASES
    return not checkpoint.info.is_snapshot and not is_lost and checkpoint.sequence >= first_sequence

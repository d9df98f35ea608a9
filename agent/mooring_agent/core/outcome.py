"""What the end of one request says of the next: when it is tried again, how wide the window is, if the store is there.

Changes the queue of the checkpoint it belongs to, and what all share of the wire. Decides nothing of other checkpoints.

The window is as wide as configured, and only SlowDown or a store that is away narrows it. Goodput does not: that a
narrower one would do says only that something else is the limit (the line, the disk, the cap), and its connections cost
little; a wider one would break the bounds on memory and connections that the configuration promises. On a slow line
the parts become smaller instead (`part_plan.py`).
"""

from collections.abc import Iterator
from typing import Final

from mooring_agent.core import upload_queue
from mooring_agent.core.checkpoint_progress import forget_upload, is_stale, progress_of
from mooring_agent.core.commands import Command, Record
from mooring_agent.core.commit import WAIT_FOR_OTHER_COMMITTER_SECONDS
from mooring_agent.core.errors import ErrorKind
from mooring_agent.core.events import CommitWaits, Event, Failed, WorkCancelled, WorkFailed
from mooring_agent.core.retry import retry_delay_seconds
from mooring_agent.core.state import Checkpoint, State
from mooring_agent.core.store_trouble import STORE_WIDE
from mooring_agent.core.work import STAYS_HERE, Operation, WorkId

_WINDOW_CUT_PAUSE_SECONDS: Final = 1.0
_LONGEST_COMMIT_POLL_SECONDS: Final = 5.0
_LONGEST_COMMIT_POLL_WHILE_DRAINING_SECONDS: Final = 0.5
_LONGEST_RETRY_WHILE_DRAINING_SECONDS: Final = 1.0
_TIDYING_RETRY_SECONDS: Final = 5.0
# The store is there, whatever else it says.
_ANSWERS: Final = frozenset({ErrorKind.THROTTLED, ErrorKind.UPLOAD_LOST})


def judge_store(state: State, work: WorkId, event: Event) -> None:
    """Whether the store as a whole is away, by how this piece of work has ended."""
    if work.operation in STAYS_HERE or isinstance(event, WorkCancelled):
        return
    if not isinstance(event, WorkFailed) or event.kind in _ANSWERS:
        state.trouble.is_over()
        return
    was_away = state.trouble.away
    state.trouble.failed(work, event.kind, event.jitter, state.now, ending=state.termination.noticed)
    if state.trouble.away and not was_away:
        state.calm_window = max(state.calm_window, state.window)
        state.window = 1.0
        state.hanging = set(state.transfers)


def hurry(state: State) -> None:
    """Nothing waits for its retry any more: there is no time for that now."""
    state.trouble.is_over()
    state.window = max(state.window, state.calm_window)
    for checkpoint in state.unfinished():
        checkpoint.delayed = dict.fromkeys(checkpoint.delayed, state.now)
        checkpoint.attempts.clear()
        state.touched[checkpoint.info.save] = None


def work_failed(state: State, checkpoint: Checkpoint, event: WorkFailed) -> Iterator[Command]:
    work = event.work
    state.failures[event.kind] = state.failures.get(event.kind, 0) + 1
    # It may have begun an upload all the same.
    checkpoint.may_have_orphans |= work.operation is Operation.CREATE_UPLOAD
    if work.operation in (Operation.RELEASE, Operation.ABANDON):
        state.delay(checkpoint, work, state.now + _TIDYING_RETRY_SECONDS)
        return
    if checkpoint.ended or (work.rank >= 0 and work.rank not in checkpoint.shares):
        return
    attempt = checkpoint.attempts.get(work, 0) + 1
    delay_seconds = retry_delay_seconds(event.kind, attempt, event.jitter)
    # Whoever announced waits for the answer and may announce again; nothing is pinned yet that would be lost.
    is_refusal = work.operation is Operation.STAGE and event.kind is ErrorKind.VOLUME_UNUSABLE
    if delay_seconds is None or is_refusal:
        yield Record(event=Failed(at=state.now, save=work.save, kind=event.kind, reason=event.message, hint=event.hint))
        return
    state.storage_error = event.message
    if event.kind is ErrorKind.THROTTLED and state.now - state.window_cut_at >= _WINDOW_CUT_PAUSE_SECONDS:
        state.window = state.calm_window = max(1.0, state.window / 2)
        state.window_cut_at = state.now
    if is_stale(checkpoint, work):
        return
    if event.kind is ErrorKind.UPLOAD_LOST:
        forget_upload(checkpoint, progress_of(checkpoint, work))
        upload_queue.withdraw(checkpoint, work)
        work = WorkId(Operation.CREATE_UPLOAD, work.save, work.rank, work.path)
        attempt = checkpoint.attempts.get(work, 0) + 1
        delay_seconds = retry_delay_seconds(event.kind, attempt, event.jitter) or 0.0
    if state.termination.noticed and event.kind in STORE_WIDE:
        delay_seconds = min(delay_seconds, _LONGEST_RETRY_WHILE_DRAINING_SECONDS)
    checkpoint.attempts[work] = attempt
    state.delay(checkpoint, work, state.now + delay_seconds)


def commit_waits(state: State, checkpoint: Checkpoint, event: CommitWaits) -> None:
    checkpoint.waits_for_ranks = event.missing_ranks > 0
    if event.missing_ranks == 0 and checkpoint.marker_due_at is None:
        checkpoint.marker_due_at = event.at + WAIT_FOR_OTHER_COMMITTER_SECONDS
    attempt = checkpoint.attempts.get(event.work, 0) + 1
    checkpoint.attempts[event.work] = attempt
    longest = _LONGEST_COMMIT_POLL_WHILE_DRAINING_SECONDS if state.termination.noticed else _LONGEST_COMMIT_POLL_SECONDS
    state.delay(checkpoint, event.work, state.now + min(longest, 0.25 * 1.5 ** min(attempt, 12)))


def widen(state: State) -> None:
    """One more part on the wire for each full window that landed; twice as many while the store is just back."""
    more = 1.0 if state.window < state.calm_window else 1.0 / state.window
    state.window = min(float(state.settings.transfer.max_concurrency), state.window + more)
    state.storage_error = ""

"""Applies the end of a request to the state: its checkpoint's progress, the time of a retry, and the upload window.

Owns the counts that must agree (`durable_bytes`, `unstored_count`, the queue). Decides nothing about other
checkpoints.

The window of concurrent requests is as wide as configured; only SlowDown or an unavailable store narrows it. A low
upload rate does not narrow it: then something else is the limit (the network, the disk, the cap), and open connections
cost little. A wider window would break the bounds on memory and connections that the configuration promises. On a slow
network the parts become smaller instead (`packs_and_parts.py`).
"""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Final

from keepstep_agent.core.agent import upload_queue
from keepstep_agent.core.agent.checkpoint import Checkpoint, FileProgress, SetAside
from keepstep_agent.core.agent.circuit_breaker import STORE_WIDE
from keepstep_agent.core.agent.commands import Ask, Command, Record
from keepstep_agent.core.agent.events import (
    Event,
    Failed,
    NewsDue,
    ObjectsLost,
    PartStored,
    Reconciled,
    WorkCancelled,
    WorkFailed,
)
from keepstep_agent.core.agent.lifecycle import Trigger
from keepstep_agent.core.agent.state import State
from keepstep_agent.core.agent.work import STAYS_HERE, Operation, WorkId
from keepstep_agent.core.errors import REFUSALS, ErrorKind, retry_delay_seconds
from keepstep_agent.core.model import CommitNews
from keepstep_agent.core.policies.commit_news import receivers_of
from keepstep_agent.core.stored.object_layout import marker_key


def progress_of(checkpoint: Checkpoint, work: WorkId) -> FileProgress:
    """Return the file that a piece of work is about."""
    return checkpoint.contributions[work.rank].files[work.path]


def store_file(checkpoint: Checkpoint, rank: int, path: str, checksum: int | None) -> None:
    """Mark a file as stored. `checksum` is None if its parts' checksums are known, or it is empty."""
    checkpoint.durable_bytes += checkpoint.contributions[rank].files.store(path, checksum)


def store_pack(checkpoint: Checkpoint, rank: int, number: int, checksums: Sequence[int]) -> None:
    """Mark a pack and its files as stored."""
    checkpoint.durable_bytes += checkpoint.contributions[rank].files.store_pack(number, checksums)


def begin_upload(checkpoint: Checkpoint, work: WorkId, upload: str) -> None:
    """Note the upload of a file that begins anew, and queue its parts. If the save has ended, it is only aborted."""
    checkpoint.durable_bytes -= checkpoint.contributions[work.rank].files.lose(work.path)
    progress = progress_of(checkpoint, work)
    assert progress.multipart is not None, work
    progress.multipart.upload = upload
    if not checkpoint.ended:
        upload_queue.enqueue(checkpoint, work.rank, progress)


def store_part(checkpoint: Checkpoint, event: PartStored) -> None:
    """Note a part of the file's current upload; the last one queues the upload's completion."""
    work = event.work
    progress = progress_of(checkpoint, work)
    multipart = progress.multipart
    if multipart is None or multipart.upload != work.upload or work.number in multipart.receipts:
        return
    multipart.receipts[work.number], multipart.checksums[work.number] = event.receipt, event.checksum
    checkpoint.durable_bytes += event.size_bytes
    if len(multipart.receipts) == len(multipart.parts):
        upload_queue.enqueue(checkpoint, work.rank, progress)


def take_up_found(checkpoint: Checkpoint, event: Reconciled) -> None:
    """Replace the recorded progress by what the store really has, and queue the rest."""
    # Before the uploads are forgotten: a completed file's checksums are those of its parts.
    for file in event.files:
        store_file(checkpoint, file.rank, file.path, file.checksum)
    for contribution in checkpoint.contributions.values():
        for progress in contribution.files.sent_in_parts():
            if not progress.stored:
                checkpoint.durable_bytes -= contribution.files.lose(progress.file.path)
    for found in event.uploads:
        progress = checkpoint.contributions[found.rank].files[found.path]
        assert progress.multipart is not None, found.path
        progress.multipart.upload = found.upload
        for number, receipt, checksum in found.parts:
            progress.multipart.receipts[number], progress.multipart.checksums[number] = receipt, checksum
        checkpoint.durable_bytes += progress.durable_bytes
    checkpoint.pending.clear()
    for contribution in checkpoint.contributions.values():
        upload_queue.enqueue_contribution(checkpoint, contribution)
    checkpoint.reconciled = True


def send_again(checkpoint: Checkpoint, event: ObjectsLost) -> None:
    """Queue the objects of ours that the store lost."""
    for rank, path in event.files:
        contribution = checkpoint.contributions[rank]
        checkpoint.durable_bytes -= contribution.files.lose(path)
        contribution.checked = False
        upload_queue.enqueue(checkpoint, rank, contribution.files[path])
    for rank, number in event.packs:
        contribution = checkpoint.contributions[rank]
        checkpoint.durable_bytes -= contribution.files.lose_pack(number)
        contribution.checked = False
        upload_queue.enqueue_pack(checkpoint, rank, contribution.files.packs[number])
    checkpoint.manifest_stored = False
    checkpoint.move(Trigger.OBJECT_LOST)


def is_stale(checkpoint: Checkpoint, work: WorkId) -> bool:
    """Whether the work belongs to a multipart upload that is not the file's current one."""
    return bool(work.upload) and progress_of(checkpoint, work).upload != work.upload


def stop_sending(checkpoint: Checkpoint) -> None:
    """Drop everything of a checkpoint that waits to be sent or retried."""
    checkpoint.pending.clear()
    checkpoint.delayed.clear()
    checkpoint.attempts.clear()
    checkpoint.failed_alone.clear()


_WINDOW_CUT_PAUSE_SECONDS: Final = 1.0
_LONGEST_RETRY_WHILE_DRAINING_SECONDS: Final = 1.0
_TIDYING_RETRY_SECONDS: Final = 5.0
# A second refusal may still be of keys that are being renewed.
_REFUSALS_BEFORE_SET_ASIDE: Final = 3
# Errors that pass, but may come with each try for one object. That takes about a minute.
_OF_ONE_OBJECT: Final = frozenset({ErrorKind.STORE_FAILED, ErrorKind.CORRUPTED_IN_TRANSIT, ErrorKind.ALREADY_EXISTS})
# These tell nothing of the object, unless the store mostly answers otherwise.
_WITHOUT_ANSWER: Final = frozenset({ErrorKind.UNREACHABLE, ErrorKind.TIMED_OUT})
_ERRORS_BEFORE_SET_ASIDE: Final = 10
# Errors that show that the store is available.
_ANSWERS: Final = frozenset({ErrorKind.THROTTLED, ErrorKind.UPLOAD_LOST})


def judge_store(state: State, work: WorkId, event: Event) -> None:
    """Tell the circuit breaker how a piece of work ended; narrow the window to 1 when the store becomes unavailable."""
    if work.operation in STAYS_HERE or isinstance(event, WorkCancelled):
        return
    state.answers += -1 if isinstance(event, WorkFailed) else 1
    if not isinstance(event, WorkFailed) or event.kind in _ANSWERS:
        state.breaker.is_over()
        return
    was_open = state.breaker.is_open
    state.breaker.failed(work, event.kind, event.jitter, state.now, ending=state.termination.noticed)
    if state.breaker.is_open and not was_open:
        state.calm_window = max(state.calm_window, state.window)
        state.window = 1.0
        state.hanging = set(state.transfers)


def reset_backoff(state: State, *, of_failures_only: bool = False) -> None:
    """Make everything that waits for a retry due at once, because the pod is ending, or only what has failed."""
    state.breaker.is_over()
    state.window = max(state.window, state.calm_window)
    for checkpoint in state.unfinished.values():
        due = checkpoint.attempts.keys() & checkpoint.delayed.keys() if of_failures_only else checkpoint.delayed
        checkpoint.delayed.update(dict.fromkeys(due, state.now))
        checkpoint.attempts.clear()
        checkpoint.failed_alone.clear()
        state.touched[checkpoint.info.save] = None


def work_failed(state: State, checkpoint: Checkpoint, event: WorkFailed) -> Iterator[Command]:
    work = event.work
    state.failures[event.kind] = state.failures.get(event.kind, 0) + 1
    # The failed request may have created an upload all the same.
    checkpoint.may_have_orphans |= work.operation is Operation.CREATE_UPLOAD
    if work.operation in (Operation.RELEASE, Operation.ABANDON):
        state.delay(checkpoint, work, state.now + _TIDYING_RETRY_SECONDS)
        return
    if checkpoint.ended or (work.rank >= 0 and work.rank not in checkpoint.contributions):
        return
    state.standstill.failed(event.kind, event.at)
    attempt = checkpoint.attempts.get(work, 0) + 1
    delay_seconds = retry_delay_seconds(event.kind, attempt, event.jitter)
    # The client waits for the answer and may announce again; nothing is pinned yet that would be lost.
    is_refusal = work.operation is Operation.STAGE and event.kind is ErrorKind.VOLUME_UNUSABLE
    if delay_seconds is None or is_refusal:
        yield Record(event=Failed(at=state.now, save=work.save, kind=event.kind, reason=event.message, hint=event.hint))
        return
    state.storage_error = f"{event.message} ({event.hint})" if event.hint else event.message
    if event.kind is ErrorKind.THROTTLED and state.now - state.window_cut_at >= _WINDOW_CUT_PAUSE_SECONDS:
        state.window = state.calm_window = max(1.0, state.window / 2)
        state.window_cut_at = state.now
    if is_stale(checkpoint, work):
        return
    if event.kind in _WITHOUT_ANSWER:
        yield from _count_alone(state, checkpoint, work)
    # A store may say so of work that has no upload; then it is a failure like others.
    if event.kind is ErrorKind.UPLOAD_LOST and work.upload:
        checkpoint.durable_bytes -= checkpoint.contributions[work.rank].files.lose(work.path)
        upload_queue.withdraw(checkpoint, work)
        work = WorkId(Operation.CREATE_UPLOAD, work.save, work.rank, work.path)
        _, lost = checkpoint.failed_alone.get(work, (0, 0))
        checkpoint.failed_alone[work] = state.answers, lost + 1
        attempt = checkpoint.attempts.get(work, 0) + 1
        delay_seconds = retry_delay_seconds(event.kind, attempt, event.jitter) or 0.0
    if state.termination.noticed and event.kind in STORE_WIDE:
        delay_seconds = min(delay_seconds, _LONGEST_RETRY_WHILE_DRAINING_SECONDS)
    if checkpoint.set_aside is None and _is_for_itself(state, checkpoint, event.kind, work, attempt):
        path = event.path or work.path
        state.put_aside(checkpoint, SetAside(at=state.now, work=event.work, path=path, reason=state.storage_error))
    checkpoint.attempts[work] = attempt
    state.delay(checkpoint, work, state.now + delay_seconds)


def _count_alone(state: State, checkpoint: Checkpoint, work: WorkId) -> Iterator[Command]:
    """Count a failure if more other work succeeded than failed since the last one. If there is none, ask the store."""
    if state.termination.noticed:
        return
    # With this failure.
    answers, failures = checkpoint.failed_alone.get(work, (state.answers + 1, 0))
    is_alone = state.answers >= answers
    checkpoint.failed_alone[work] = state.answers, failures + is_alone
    ask = WorkId(Operation.ASK, work.save)
    is_known_to_fail = work in checkpoint.attempts and not state.transfers and not _is_untried_left(state, work)
    if is_known_to_fail and ask not in state.in_flight:
        state.launch(ask)
        yield Ask(work=ask, key=marker_key(checkpoint.info))


def _is_untried_left(state: State, work: WorkId) -> bool:
    """Whether work on another object waits for its turn that has not failed yet: it will show what the store does."""
    return any(
        other.path != work.path and other not in checkpoint.attempts
        for checkpoint in state.unfinished.values()
        if checkpoint.set_aside is None
        for other in chain(checkpoint.pending, checkpoint.delayed)
    )


def _is_for_itself(state: State, checkpoint: Checkpoint, kind: ErrorKind, work: WorkId, attempt: int) -> bool:
    """Whether work that failed so often fails for a reason of its own, so that others should go before."""
    if kind in REFUSALS:
        return attempt >= _REFUSALS_BEFORE_SET_ASIDE
    if kind in _OF_ONE_OBJECT:
        return attempt >= _ERRORS_BEFORE_SET_ASIDE and not state.breaker.is_open
    # Before a deadline there is no time for a doubt.
    _, failures = checkpoint.failed_alone.get(work, (0, 0))
    return failures >= _ERRORS_BEFORE_SET_ASIDE and not state.termination.noticed


def grow_window(state: State) -> None:
    """Grow the window by one for each full window that was stored; double it up to its size before an outage."""
    more = 1.0 if state.window < state.calm_window else 1.0 / state.window
    state.window = min(float(state.settings.transfer.max_concurrency), state.window + more)
    state.storage_error = ""


def news_of_commit(state: State, checkpoint: Checkpoint) -> Iterator[Record]:
    """Yield the news of a checkpoint that has just been committed. Of a job's agents that of rank 0 tells it."""
    receivers = receivers_of(state.settings.events)
    if receivers and (checkpoint.info.is_snapshot or 0 in checkpoint.contributions):
        news = CommitNews(
            info=checkpoint.info,
            attempt=state.settings.attempt,
            size_bytes=checkpoint.size_bytes,
            committed_at=checkpoint.committed_at,
        )
        yield Record(event=NewsDue(at=checkpoint.committed_at, news=news, receivers=receivers))

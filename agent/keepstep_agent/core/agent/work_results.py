"""Applies the end of a request to the state: its checkpoint's progress, the time of a retry, and the upload window.

Owns the counts that must agree (`durable_bytes`, `unstored_count`, the queue). Decides nothing about other
checkpoints.

The window of concurrent requests is as wide as configured; only SlowDown or an unavailable store narrows it. A low
upload rate does not narrow it: then something else is the limit (the network, the disk, the cap), and open connections
cost little. A wider window would break the bounds on memory and connections that the configuration promises. On a slow
network the parts become smaller instead (`packs_and_parts.py`).
"""

from collections.abc import Iterator
from typing import Final

from keepstep_agent.core.agent import upload_queue
from keepstep_agent.core.agent.checkpoint import Checkpoint, FileProgress
from keepstep_agent.core.agent.circuit_breaker import STORE_WIDE
from keepstep_agent.core.agent.commands import Command, Record
from keepstep_agent.core.agent.events import (
    Event,
    Failed,
    NewsDue,
    ObjectsLost,
    Reconciled,
    WorkCancelled,
    WorkFailed,
)
from keepstep_agent.core.agent.lifecycle import Trigger
from keepstep_agent.core.agent.state import State
from keepstep_agent.core.agent.work import STAYS_HERE, Operation, WorkId
from keepstep_agent.core.errors import ErrorKind, retry_delay_seconds
from keepstep_agent.core.model import CommitNews
from keepstep_agent.core.policies.commit_news import receivers_of


def progress_of(checkpoint: Checkpoint, work: WorkId) -> FileProgress:
    """Return the file that a piece of work is about."""
    return checkpoint.contributions[work.rank].files[work.path]


def store_file(checkpoint: Checkpoint, rank: int, path: str, checksum: int | None) -> None:
    """Mark a file as stored. `checksum` is None if its parts' checksums are known, or it is empty."""
    contribution = checkpoint.contributions[rank]
    progress = contribution.files[path]
    if progress.stored:
        return
    checkpoint.durable_bytes -= progress.durable_bytes
    progress.stored = True
    if checksum is not None:
        progress.checksums = {1: checksum}
    checkpoint.durable_bytes += progress.file.size_bytes
    contribution.unstored_count -= 1


def store_pack(checkpoint: Checkpoint, rank: int, number: int, checksums: tuple[int, ...]) -> None:
    """Mark a pack and its files as stored."""
    progress = checkpoint.contributions[rank].packs[number]
    progress.stored = True
    for file, checksum in zip(progress.pack.files, checksums, strict=True):
        store_file(checkpoint, rank, file.path, checksum if file.size_bytes else None)


def take_up_found(checkpoint: Checkpoint, event: Reconciled) -> None:
    """Replace the recorded progress by what the store really has, and queue the rest."""
    # Before the uploads are forgotten: a completed file's checksums are those of its parts.
    for file in event.files:
        store_file(checkpoint, file.rank, file.path, file.checksum)
    for contribution in checkpoint.contributions.values():
        for progress in contribution.files.values():
            if not progress.stored:
                forget_upload(checkpoint, progress)
    for found in event.uploads:
        progress = checkpoint.contributions[found.rank].files[found.path]
        progress.upload = found.upload
        for number, receipt, checksum in found.parts:
            progress.receipts[number], progress.checksums[number] = receipt, checksum
        checkpoint.durable_bytes += progress.durable_bytes
    checkpoint.pending.clear()
    for contribution in checkpoint.contributions.values():
        upload_queue.enqueue_contribution(checkpoint, contribution)
    checkpoint.reconciled = True


def send_again(checkpoint: Checkpoint, event: ObjectsLost) -> None:
    """Queue the objects of ours that the store lost."""
    for rank, path in event.files:
        progress = checkpoint.contributions[rank].files[path]
        forget_upload(checkpoint, progress)
        progress.stored = False
        checkpoint.contributions[rank].unstored_count += 1
        checkpoint.contributions[rank].checked = False
        upload_queue.enqueue(checkpoint, rank, progress)
    for rank, number in event.packs:
        contribution = checkpoint.contributions[rank]
        packed = contribution.packs[number]
        packed.stored = False
        for file in packed.pack.files:
            progress = contribution.files[file.path]
            forget_upload(checkpoint, progress)
            progress.stored = False
        contribution.unstored_count += len(packed.pack.files)
        contribution.checked = False
        upload_queue.enqueue_pack(checkpoint, rank, packed)
    checkpoint.manifest_stored = False
    checkpoint.move(Trigger.OBJECT_LOST)


def forget_upload(checkpoint: Checkpoint, progress: FileProgress) -> None:
    """Forget what is stored of a file: it begins anew."""
    checkpoint.durable_bytes -= progress.durable_bytes
    progress.upload = ""
    progress.receipts, progress.checksums = {}, {}


def is_stale(checkpoint: Checkpoint, work: WorkId) -> bool:
    """Whether the work belongs to a multipart upload that is not the file's current one."""
    return bool(work.upload) and progress_of(checkpoint, work).upload != work.upload


def stop_sending(checkpoint: Checkpoint) -> None:
    """Drop everything of a checkpoint that waits to be sent or retried."""
    checkpoint.pending.clear()
    checkpoint.delayed.clear()
    checkpoint.attempts.clear()


_WINDOW_CUT_PAUSE_SECONDS: Final = 1.0
_LONGEST_RETRY_WHILE_DRAINING_SECONDS: Final = 1.0
_TIDYING_RETRY_SECONDS: Final = 5.0
# Errors that show that the store is available.
_ANSWERS: Final = frozenset({ErrorKind.THROTTLED, ErrorKind.UPLOAD_LOST})


def judge_store(state: State, work: WorkId, event: Event) -> None:
    """Tell the circuit breaker how a piece of work ended; narrow the window to 1 when the store becomes unavailable."""
    if work.operation in STAYS_HERE or isinstance(event, WorkCancelled):
        return
    if not isinstance(event, WorkFailed) or event.kind in _ANSWERS:
        state.breaker.is_over()
        return
    was_open = state.breaker.is_open
    state.breaker.failed(work, event.kind, event.jitter, state.now, ending=state.termination.noticed)
    if state.breaker.is_open and not was_open:
        state.calm_window = max(state.calm_window, state.window)
        state.window = 1.0
        state.hanging = set(state.transfers)


def reset_backoff(state: State) -> None:
    """Make everything that waits for a retry due at once, because the pod is ending."""
    state.breaker.is_over()
    state.window = max(state.window, state.calm_window)
    for checkpoint in state.unfinished.values():
        checkpoint.delayed = dict.fromkeys(checkpoint.delayed, state.now)
        checkpoint.attempts.clear()
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
    attempt = checkpoint.attempts.get(work, 0) + 1
    delay_seconds = retry_delay_seconds(event.kind, attempt, event.jitter)
    # The client waits for the answer and may announce again; nothing is pinned yet that would be lost.
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

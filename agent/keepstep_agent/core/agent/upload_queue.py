"""Chooses the next transfer: the newest checkpoint first, just-in-time saves above all, preemption between parts.

A checkpoint that is set aside comes after all others: it cannot become durable unless somebody removes the cause.

With newest-first alone, a trainer that saves faster than the store takes would preempt every upload before it
finishes, and nothing would ever commit. So a save that preempted an unfinished one stays the active upload until its
files are stored; only a just-in-time or final save preempts it. The newest checkpoint waits for at most one older one,
and for none after a termination notice. Until its bytes are sent, the newest shares the upload window with no other
checkpoint, even if it cannot fill the window, but for one older one that was on its way. A just-in-time save with a
deadline cancels that too.
"""

from collections import deque
from collections.abc import Iterator

from keepstep_agent.core.agent import drain
from keepstep_agent.core.agent.checkpoint import Checkpoint, FileProgress, PackProgress, RankContribution
from keepstep_agent.core.agent.commands import (
    CancelWork,
    Command,
    CompleteUpload,
    CreateUpload,
    PutFile,
    PutPack,
    SendPart,
)
from keepstep_agent.core.agent.lifecycle import Trigger
from keepstep_agent.core.agent.state import State
from keepstep_agent.core.agent.work import CANCELLABLE, TRANSFERS, Operation, WorkId
from keepstep_agent.core.model import Kind, Phase, Region
from keepstep_agent.core.stored.object_layout import file_key, pack_key

# Completing an upload sends no bytes, and may take minutes.
_BEFORE_THE_LAST_BYTE = TRANSFERS - {Operation.COMPLETE_UPLOAD}
_PREEMPTING_KINDS = frozenset({Kind.JUST_IN_TIME, Kind.FINAL})


def choose_active_upload(state: State) -> None:
    """Make the newest checkpoint the active upload, unless the present one preempted another and still sends files."""
    newest, active = state.newest_sending(), _active(state)
    if newest is None or active is None:
        state.active_upload, state.active_upload_preempted = newest.info.save if newest else "", False
    elif newest is not active and (newest.info.kind in _PREEMPTING_KINDS or not state.active_upload_preempted):
        state.active_upload = newest.info.save
        state.active_upload_preempted = active.phase is Phase.UPLOADING


def order(state: State) -> Iterator[Checkpoint]:
    """Yield the checkpoints that have files to send, the most important first.

    The active upload goes before newer ones, but not before a just-in-time save unless it is one. After a termination
    notice it has no such precedence.
    """
    active = None if state.termination.noticed else _active(state)
    active_waits = active is not None
    for checkpoint in reversed(state.sending):
        if active is not None and active_waits and active.urgency[:2] == checkpoint.urgency[:2]:
            active_waits = False
            yield active
        if checkpoint is not active:
            yield checkpoint


def _active(state: State) -> Checkpoint | None:
    active = state.checkpoints.get(state.active_upload)
    return active if active is not None and active.sends and active.set_aside is None else None


def enqueue_contribution(checkpoint: Checkpoint, contribution: RankContribution) -> None:
    """Queue all transfers that a rank's files still need."""
    for progress in contribution.files.sent_alone():
        enqueue(checkpoint, contribution.rank, progress)
    for packed in contribution.files.packs:
        enqueue_pack(checkpoint, contribution.rank, packed)


def enqueue_pack(checkpoint: Checkpoint, rank: int, progress: PackProgress) -> None:
    if not progress.stored:
        save, number = checkpoint.info.save, progress.pack.number
        checkpoint.pending.append(WorkId(Operation.PUT_PACK, save, rank, number=number))


def enqueue(checkpoint: Checkpoint, rank: int, progress: FileProgress) -> None:
    """Queue the transfers that a file still needs; none if it is sent with a pack."""
    save, path, multipart = checkpoint.info.save, progress.file.path, progress.multipart
    if progress.stored or progress.place is not None:
        return
    if multipart is None:
        checkpoint.pending.append(WorkId(Operation.PUT_FILE, save, rank, path))
    elif not multipart.upload:
        checkpoint.pending.append(WorkId(Operation.CREATE_UPLOAD, save, rank, path))
    else:
        missing = [part.number for part in multipart.parts if part.number not in multipart.receipts]
        # A file that was begun goes first, so that fewer multipart uploads are open at a time.
        for number in reversed(missing):
            checkpoint.pending.appendleft(WorkId(Operation.SEND_PART, save, rank, path, number, multipart.upload))
        if not missing:
            checkpoint.pending.appendleft(WorkId(Operation.COMPLETE_UPLOAD, save, rank, path, 0, multipart.upload))


def requeue(state: State, checkpoint: Checkpoint) -> None:
    """Queue the transfers whose retry is due."""
    for work in [work for work, due in checkpoint.delayed.items() if due <= state.now and work.operation in TRANSFERS]:
        del checkpoint.delayed[work]
        checkpoint.pending.appendleft(work)


def withdraw(checkpoint: Checkpoint, lost: WorkId) -> None:
    """Remove all transfers of a lost multipart upload from the queue."""
    checkpoint.pending = deque(work for work in checkpoint.pending if work.upload != lost.upload)
    for work in [work for work in checkpoint.delayed if work.upload == lost.upload]:
        del checkpoint.delayed[work]


def make_room(state: State) -> Iterator[Command]:
    """Cancel the transfers that the most important checkpoint must not share the connection with.

    A just-in-time save with a deadline shares it with none. Any other newest checkpoint shares it with one older one at
    most: files that are sent whole have no parts to be preempted between.
    """
    kept = _sharing(state)
    for work in sorted(state.transfers - state.cancelling) if kept else ():
        if work.operation in CANCELLABLE and work.save not in kept:
            state.cancelling.add(work)
            yield CancelWork(work=work)


def _sharing(state: State) -> frozenset[str]:
    """Return the saves that may be on the wire while the most important one has files to store; empty: all may."""
    if state.termination.noticed:
        first = next(_worth_the_wire(state), None)
        alone = first is not None and _is_last_save(state, first) and _has_files_to_store(state, first)
        return frozenset({first.info.save}) if first is not None and alone else frozenset()
    newest, active = state.newest_sending(), _active(state)
    if newest is None or state.breaker.is_open or not _has_files_to_store(state, newest):
        return frozenset()
    older = {work.save for work in state.transfers if work.operation in CANCELLABLE} - {newest.info.save}
    if active is not None and active is not newest:
        one = active.info.save
    else:
        one = max(older, key=lambda save: state.checkpoints[save].sequence, default="")
    return frozenset({newest.info.save, one}) if len(older) > 1 else frozenset()


def next_transfers(state: State) -> Iterator[Command]:
    """Start transfers until the upload window is full."""
    choose_active_upload(state)
    limit = state.settings.transfer.max_concurrency
    if not state.breaker.is_open:
        # Transfers that hang from an outage of the store take no place from those that start after it.
        limit = min(limit, int(state.window) + len(state.hanging))
    first: Checkpoint | None = None
    for checkpoint in _worth_the_wire(state):
        if len(state.transfers) >= limit or (first is not None and _must_wait(state, checkpoint, first)):
            return
        first = first or checkpoint
        while len(state.transfers) < limit and (work := _next_of(state, checkpoint)) is not None:
            state.launch(work)
            checkpoint.move(Trigger.TRANSFER_BEGAN)
            yield _command(state, checkpoint, work)


def _worth_the_wire(state: State) -> Iterator[Checkpoint]:
    """Yield the checkpoints of `order` without the older ones that do not fit before the deadline."""
    newest = drain.newest_possible(state)
    return (one for one in order(state) if one is newest or drain.worth_sending(state, one))


def _next_of(state: State, checkpoint: Checkpoint) -> WorkId | None:
    """Remove and return the next transfer of a checkpoint's queue."""
    if not state.breaker.is_open:
        return checkpoint.pending.popleft() if checkpoint.pending else None
    if state.now < state.breaker.next_at:
        return None
    work = next((work for work in checkpoint.pending if state.breaker.lets_out(work, state.now)), None)
    if work is not None:
        checkpoint.pending.remove(work)
    return work


def _must_wait(state: State, checkpoint: Checkpoint, first: Checkpoint) -> bool:
    """Whether a checkpoint that is not the first may not start a transfer: until the last byte of the newest is sent.

    While the store is unavailable, every one may probe it.
    """
    if _is_last_save(state, first):
        return _has_files_to_store(state, first)
    newest = state.newest_sending()
    if state.breaker.is_open or newest is None or checkpoint is newest:
        return False
    # A transfer that has failed before does not block others: it may fail forever.
    return any(
        work.operation in _BEFORE_THE_LAST_BYTE and work not in newest.attempts
        for work in state.in_flight_of(newest.info.save)
    )


def _is_last_save(state: State, checkpoint: Checkpoint) -> bool:
    """Whether it is a just-in-time save after a termination notice, and was not set aside."""
    is_just_in_time = checkpoint.info.kind is Kind.JUST_IN_TIME and checkpoint.set_aside is None
    return state.termination.noticed and is_just_in_time


def _has_files_to_store(state: State, checkpoint: Checkpoint) -> bool:
    """Whether transfers are ready or in flight. Those that wait for a retry do not count and let others pass."""
    return bool(checkpoint.pending) or any(
        work.operation in TRANSFERS for work in state.in_flight_of(checkpoint.info.save)
    )


def _command(state: State, checkpoint: Checkpoint, work: WorkId) -> Command:
    if work.operation is Operation.PUT_PACK:
        pack = checkpoint.contributions[work.rank].files.packs[work.number].pack
        key = pack_key(checkpoint.info, work.rank, pack.number)
        return PutPack(work=work, key=key, pack=pack, volume=state.settings.volume)
    progress = checkpoint.contributions[work.rank].files[work.path]
    key = file_key(checkpoint.info, work.path)
    match work.operation:
        case Operation.CREATE_UPLOAD:
            return CreateUpload(work=work, key=key)
        case Operation.SEND_PART:
            assert progress.multipart is not None, work
            part = progress.multipart.parts[work.number - 1]
            region = _region(state, progress, part.offset_bytes, part.size_bytes)
            return SendPart(work=work, key=key, region=region)
        case Operation.COMPLETE_UPLOAD:
            assert progress.multipart is not None, work
            receipts = progress.multipart.receipts
            return CompleteUpload(
                work=work,
                key=key,
                receipts=tuple(receipts[part.number] for part in progress.multipart.parts),
                size_bytes=progress.file.size_bytes,
            )
        case _:
            assert work.operation is Operation.PUT_FILE, work
            return PutFile(work=work, key=key, region=_region(state, progress, 0, progress.file.size_bytes))


def _region(state: State, progress: FileProgress, offset_bytes: int, size_bytes: int) -> Region:
    return Region(
        volume=state.settings.volume,
        path=progress.file.pin,
        offset_bytes=offset_bytes,
        size_bytes=size_bytes,
        fingerprint=progress.file.fingerprint,
    )

"""Which transfer next: latest first, just-in-time above all, preemptive between parts.

Pure latest-first starves itself: a trainer that saves faster than the store takes would push every upload aside
before it finishes, and nothing would ever commit. So a save that pushed an unfinished one aside keeps the wire until
its files are stored; only a just-in-time or final save goes before it. The newest waits for at most one older
checkpoint, and for none once the pod is known to end. Until its bytes are sent the newest shares the wire with nobody,
also where it cannot use the whole window; a just-in-time save with a deadline takes it from the others at once.
"""

from collections import deque
from collections.abc import Iterator

from mooring_agent.core.agent import drain
from mooring_agent.core.agent.checkpoint import Checkpoint, FileProgress, PackProgress, RankContribution
from mooring_agent.core.agent.commands import (
    CancelWork,
    Command,
    CompleteUpload,
    CreateUpload,
    PutFile,
    PutPack,
    SendPart,
)
from mooring_agent.core.agent.lifecycle import Trigger
from mooring_agent.core.agent.state import State
from mooring_agent.core.agent.work import CANCELLABLE, TRANSFERS, Operation, WorkId
from mooring_agent.core.model import Kind, Phase, Region
from mooring_agent.core.stored.object_layout import file_key, pack_key

# Completing an upload sends no bytes, and may take minutes.
_BEFORE_THE_LAST_BYTE = TRANSFERS - {Operation.COMPLETE_UPLOAD}
_PREEMPTING_KINDS = frozenset({Kind.JUST_IN_TIME, Kind.FINAL})


def choose_leader(state: State) -> None:
    """Who has the wire now: the newest, unless the present one pushed another aside and is not sealed yet."""
    newest, active = state.newest_sending(), _active(state)
    if newest is None or active is None:
        state.active_upload, state.active_upload_preempted = newest.info.save if newest else "", False
    elif newest is not active and (newest.info.kind in _PREEMPTING_KINDS or not state.active_upload_preempted):
        state.active_upload = newest.info.save
        state.active_upload_preempted = active.phase is Phase.UPLOADING


def order(state: State) -> Iterator[Checkpoint]:
    """Checkpoints with something to send, the most important first. At the end of a pod no older one is protected."""
    active = None if state.termination.noticed else _active(state)
    active_waits = active is not None
    for checkpoint in reversed(state.sending):
        if active is not None and active_waits and active.urgency[0] == checkpoint.urgency[0]:
            active_waits = False
            yield active
        if checkpoint is not active:
            yield checkpoint


def _active(state: State) -> Checkpoint | None:
    active = state.checkpoints.get(state.active_upload)
    return active if active is not None and active.sends else None


def enqueue_contribution(checkpoint: Checkpoint, contribution: RankContribution) -> None:
    """Put all that a rank's files still need into the queue of its checkpoint."""
    for progress in contribution.files.values():
        enqueue(checkpoint, contribution.rank, progress)
    for packed in contribution.packs:
        enqueue_pack(checkpoint, contribution.rank, packed)


def enqueue_pack(checkpoint: Checkpoint, rank: int, progress: PackProgress) -> None:
    if not progress.stored:
        save, number = checkpoint.info.save, progress.pack.number
        checkpoint.pending.append(WorkId(Operation.PUT_PACK, save, rank, number=number))


def enqueue(checkpoint: Checkpoint, rank: int, progress: FileProgress) -> None:
    """Put what a file still needs into the queue of its checkpoint; nothing if it goes with a pack."""
    save, path = checkpoint.info.save, progress.file.path
    if progress.stored or progress.place is not None:
        return
    if progress.whole:
        checkpoint.pending.append(WorkId(Operation.PUT_FILE, save, rank, path))
    elif not progress.upload_id:
        checkpoint.pending.append(WorkId(Operation.CREATE_UPLOAD, save, rank, path))
    else:
        missing = [part.number for part in progress.parts if part.number not in progress.etags]
        # A begun file goes on before the next one is begun: fewer multipart uploads are open at a time.
        for number in reversed(missing):
            checkpoint.pending.appendleft(WorkId(Operation.SEND_PART, save, rank, path, number, progress.upload_id))
        if not missing:
            checkpoint.pending.appendleft(WorkId(Operation.COMPLETE_UPLOAD, save, rank, path, 0, progress.upload_id))


def requeue(state: State, checkpoint: Checkpoint) -> None:
    """What has waited long enough for its retry is ready again."""
    for work in [work for work, due in checkpoint.delayed.items() if due <= state.now and work.operation in TRANSFERS]:
        del checkpoint.delayed[work]
        checkpoint.pending.appendleft(work)


def withdraw(checkpoint: Checkpoint, lost: WorkId) -> None:
    """Take everything of a lost multipart upload out of the queue."""
    checkpoint.pending = deque(work for work in checkpoint.pending if work.upload != lost.upload)
    for work in [work for work in checkpoint.delayed if work.upload == lost.upload]:
        del checkpoint.delayed[work]


def make_room(state: State) -> Iterator[Command]:
    """Take other transfers off the wire when a just-in-time save needs it whose deadline runs."""
    first = next(_worth_the_wire(state), None)
    if first is None or not _is_last_save(state, first) or not _has_files_to_store(state, first):
        return
    for work in sorted(state.transfers - state.cancelling):
        if work.operation in CANCELLABLE and work.save != first.info.save:
            state.cancelling.add(work)
            yield CancelWork(work=work)


def next_transfers(state: State) -> Iterator[Command]:
    """Fill the window."""
    choose_leader(state)
    limit = state.settings.transfer.max_concurrency
    if not state.breaker.away:
        # What hangs on the wire since the store went away takes no place from what is sent now that it is back.
        limit = min(limit, int(state.window) + len(state.hanging))
    first: Checkpoint | None = None
    for checkpoint in _worth_the_wire(state):
        if len(state.transfers) >= limit or (first is not None and _has_the_wire_alone(state, first)):
            return
        first = first or checkpoint
        while len(state.transfers) < limit and (work := _next_of(state, checkpoint)) is not None:
            state.launch(work)
            checkpoint.move(Trigger.TRANSFER_BEGAN)
            yield _command(state, checkpoint, work)


def _worth_the_wire(state: State) -> Iterator[Checkpoint]:
    """In order, without the older ones that would not be stored before the end."""
    newest = drain.newest_possible(state)
    return (one for one in order(state) if one is newest or drain.worth_sending(state, one))


def _next_of(state: State, checkpoint: Checkpoint) -> WorkId | None:
    """Take the next transfer of a checkpoint out of its queue."""
    if not state.breaker.away:
        return checkpoint.pending.popleft() if checkpoint.pending else None
    if state.now < state.breaker.next_at:
        return None
    work = next((work for work in checkpoint.pending if state.breaker.lets_out(work, state.now)), None)
    if work is not None:
        checkpoint.pending.remove(work)
    return work


def _has_the_wire_alone(state: State, first: Checkpoint) -> bool:
    """Nothing else is begun. While the store is away there is no wire to share, and everybody may ask for it."""
    if _is_last_save(state, first):
        return _has_files_to_store(state, first)
    if state.breaker.away or first is not state.newest_sending():
        return False
    # What has failed before may fail for ever, and is no reason to send nothing else.
    return any(
        work.operation in _BEFORE_THE_LAST_BYTE and work not in first.attempts
        for work in state.in_flight_of(first.info.save)
    )


def _is_last_save(state: State, checkpoint: Checkpoint) -> bool:
    """A just-in-time save whose deadline runs."""
    return state.termination.noticed and checkpoint.info.kind is Kind.JUST_IN_TIME


def _has_files_to_store(state: State, checkpoint: Checkpoint) -> bool:
    """Ready or on the wire; what waits for its retry leaves the wire to others."""
    return bool(checkpoint.pending) or any(
        work.operation in TRANSFERS for work in state.in_flight_of(checkpoint.info.save)
    )


def _command(state: State, checkpoint: Checkpoint, work: WorkId) -> Command:
    if work.operation is Operation.PUT_PACK:
        pack = checkpoint.contributions[work.rank].packs[work.number].pack
        key = pack_key(checkpoint.info, work.rank, pack.number)
        return PutPack(work=work, key=key, pack=pack, volume=state.settings.volume)
    progress = checkpoint.contributions[work.rank].files[work.path]
    key = file_key(checkpoint.info, work.path)
    match work.operation:
        case Operation.CREATE_UPLOAD:
            return CreateUpload(work=work, key=key)
        case Operation.SEND_PART:
            part = progress.parts[work.number - 1]
            region = _region(state, progress, part.offset_bytes, part.size_bytes)
            return SendPart(work=work, key=key, upload_id=work.upload, region=region)
        case Operation.COMPLETE_UPLOAD:
            return CompleteUpload(
                work=work,
                key=key,
                upload_id=work.upload,
                etags=tuple(progress.etags[part.number] for part in progress.parts),
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

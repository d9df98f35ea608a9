"""A checkpoint arrives: a rank announces its part, then its files are pinned and become the queue of what to send.

Owns the making of `Checkpoint`, `Share` and `FileProgress`. Whether an announcement may enter is `admission.py`'s.
"""

from collections.abc import Iterator

from mooring_agent.core import upload_queue
from mooring_agent.core.commands import Command, Record
from mooring_agent.core.errors import ErrorKind
from mooring_agent.core.events import Announced, Failed, Staged
from mooring_agent.core.lifecycle import Trigger
from mooring_agent.core.model import PackPlace, Phase, StagedFile
from mooring_agent.core.pack_plan import plan_packs
from mooring_agent.core.part_plan import part_size_for, plan
from mooring_agent.core.state import Checkpoint, FileProgress, PackProgress, Share, State


def announced(state: State, event: Announced) -> None:
    save = event.info.save
    checkpoint = state.checkpoints.get(save)
    if checkpoint is None or checkpoint.phase is Phase.FAILED:
        # A save that failed to be staged may be announced again once its trainer has mended it.
        checkpoint = Checkpoint(info=event.info, sequence=state.next_sequence, announced_at=event.at)
        state.checkpoints.pop(save, None)
        state.checkpoints[save] = checkpoint
        state.next_sequence += 1
    else:
        checkpoint.move(Trigger.RANK_ANNOUNCED)
    checkpoint.shares[event.rank] = Share(
        rank=event.rank,
        source=event.source,
        requested_files=event.files,
        announced_at=event.at,
        local_world_size=max(1, event.local_world_size),
        signature=event.signature,
        save_made_here=event.save_made_here,
        recorded_at=event.recorded_at,
    )
    state.begun.pop(save, None)


def staged(state: State, checkpoint: Checkpoint, event: Staged) -> Iterator[Command]:
    lead = checkpoint.shares[event.work.rank]
    if lead.staged:
        return
    yield from _fail_rewritten(state, checkpoint, event)
    lead.staged = True
    if checkpoint.phase is Phase.ANNOUNCED and lead.recorded_at is not None:
        # As after a restart: an earlier agent may have stored some of it, and even have committed it.
        checkpoint.reconciled, checkpoint.may_have_orphans = False, True
    packs = plan_packs(event.files, event.pack_size_bytes)
    places = {
        file.path: PackPlace(number=pack.number, offset_bytes=offset_bytes)
        for pack in packs
        for file, offset_bytes in zip(pack.files, pack.offsets_bytes, strict=True)
    }
    lead.packs = [PackProgress(pack) for pack in packs]
    for file in event.files:
        part_size_bytes = part_size_for(file.size_bytes, event.part_size_bytes)
        progress = FileProgress(
            file=file,
            part_size_bytes=part_size_bytes,
            parts=plan(file.size_bytes, part_size_bytes),
            place=places.get(file.path),
        )
        lead.files[file.path] = progress
        checkpoint.size_bytes += file.size_bytes
    upload_queue.enqueue_share(checkpoint, lead)
    came_before = state.staged_from(lead.source, before=checkpoint) is not None
    state.link(checkpoint, lead)
    if came_before and any(file.private for file in event.files):
        # Pinned from there before, and rewritten in place since. What lies beside it was not seen to be; and where
        # nothing can be linked, a first copy says nothing.
        state.rewritten_paths.add(lead.source)
    lead.unstored_count = len(lead.files)
    checkpoint.file_count += len(lead.files)
    if not lead.requested_files and lead.local_world_size > 1:
        # The directory that the ranks share went to the first of them; the others contribute nothing more.
        for share in checkpoint.shares.values():
            share.staged |= not share.requested_files and share.source == lead.source
    state.recent_sizes_bytes.append(checkpoint.size_bytes)
    checkpoint.move(Trigger.RANK_STAGED)


def _fail_rewritten(state: State, checkpoint: Checkpoint, event: Staged) -> Iterator[Command]:
    """An inode of an older pin has come back with other content: its trainer rewrites files in place."""
    source = checkpoint.shares[event.work.rank].source
    for other, file in _rewritten_files(state, checkpoint, event):
        state.rewritten_paths.add(source)
        if state.live:
            yield Record(
                event=Failed(
                    at=state.now,
                    save=other.info.save,
                    kind=ErrorKind.FILE_CHANGED,
                    reason=f"{file.path} was rewritten in place by the save of step {checkpoint.info.step}",
                    hint="save every checkpoint into a new directory; from now on this one is copied, not linked",
                )
            )


def _rewritten_files(state: State, checkpoint: Checkpoint, event: Staged) -> list[tuple[Checkpoint, StagedFile]]:
    """A file of each older checkpoint whose inode has other content now. What is stored is safe from the trainer."""
    found: dict[str, StagedFile] = {}
    for file in event.files:
        for save, linked in () if file.private else state.links_to(file.fingerprint.inode):
            if save != checkpoint.info.save and not linked.stored and linked.file.fingerprint != file.fingerprint:
                found.setdefault(save, linked.file)
    others = sorted((state.checkpoints[save] for save in found), key=lambda other: other.sequence)
    return [(other, found[other.info.save]) for other in others]

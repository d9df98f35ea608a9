"""Announcements: which ones are refused, and how an accepted one becomes a queue of files to upload.

An announcement is checked before it is journaled, so a refusal changes nothing. Only this module creates `Checkpoint`,
`RankContribution` and `RankFiles`.
"""

from collections.abc import Iterator
from itertools import compress

from keepstep_agent.core.agent import upload_queue
from keepstep_agent.core.agent.checkpoint import Checkpoint, RankContribution, RankFiles
from keepstep_agent.core.agent.commands import Command, Record
from keepstep_agent.core.agent.events import Announced, Failed, Staged
from keepstep_agent.core.agent.lifecycle import Trigger
from keepstep_agent.core.agent.state import State
from keepstep_agent.core.errors import ErrorKind, RequestError
from keepstep_agent.core.file_lists import StagedFiles
from keepstep_agent.core.limits import LOCAL_RANKS
from keepstep_agent.core.model import Phase, StagedFile
from keepstep_agent.core.stored.object_layout import check_file_path, check_token


def known_announcement(state: State, event: Announced) -> Checkpoint | None:
    """Return the checkpoint that this announcement has already created; None if the announcement is new."""
    checkpoint = state.checkpoints.get(event.info.save)
    if checkpoint is None or checkpoint.phase is Phase.FAILED:
        return None
    if checkpoint.phase is Phase.SHED:
        # Its other ranks may announce after it was shed.
        return checkpoint
    contribution = checkpoint.contributions.get(event.rank)
    return checkpoint if contribution is not None and contribution.announced.path == event.path else None


def same_content(state: State, *, path: str, rank: int, signature: str) -> Checkpoint | None:
    """Return the newest checkpoint whose `rank` has this path and signature, for clients that give no save id."""
    for checkpoint in reversed(state.checkpoints.values()):
        contribution = checkpoint.contributions.get(rank)
        if (
            contribution
            and checkpoint.phase is not Phase.FAILED
            and (contribution.announced.path, contribution.announced.signature) == (path, signature)
        ):
            return checkpoint
    return None


def check_announcement(state: State, event: Announced) -> None:
    """Raise RequestError if the announcement makes no sense or contradicts an earlier one."""
    if state.termination.exiting:
        raise RequestError(
            ErrorKind.SHUTTING_DOWN,
            "the agent is exiting",
            hint="the checkpoint stays on the volume for the next start",
        )
    info = event.info
    if info.is_snapshot != (event.snapshot is not None):
        raise RequestError(ErrorKind.BAD_REQUEST, "only the agent takes snapshots", hint="announce another kind")
    check_token(info.name, "checkpoint name")
    check_token(info.save, "save id")
    for file in (*event.files, *event.others):
        check_file_path(file)
    if event.others and not event.files:
        raise RequestError(
            ErrorKind.BAD_REQUEST,
            f"others without files: without them everything in {event.path} is the checkpoint",
            hint="list the files of the save in `files` too",
        )
    if not 0 <= event.rank < info.world_size:
        raise RequestError(
            ErrorKind.BAD_REQUEST,
            f"rank {event.rank} does not exist in a world of {info.world_size}",
            hint="ranks count from 0 to world_size - 1",
        )
    if event.local_world_size > info.world_size:
        raise RequestError(
            ErrorKind.BAD_REQUEST,
            f"local_world_size {event.local_world_size} is more than world_size {info.world_size}",
            hint="local_world_size counts the ranks that announce to this agent",
        )
    checkpoint = state.checkpoints.get(info.save)
    if checkpoint is None:
        return
    if len(checkpoint.contributions) >= LOCAL_RANKS and event.rank not in checkpoint.contributions:
        raise RequestError(
            ErrorKind.BAD_REQUEST,
            f"save {info.save} has {LOCAL_RANKS} ranks on this agent already",
            hint="one agent cannot serve more ranks: announce the directory once for all of them",
        )
    if checkpoint.phase is Phase.FAILED:
        if checkpoint.any_staged:
            raise _contradiction(
                f"save {info.save} has failed after some of it may have been sent: {checkpoint.reason}",
                "use a new save id: Keepstep never stores other bytes under the same key",
            )
        return
    if checkpoint.info != info:
        raise _contradiction(
            f"save {info.save} is known as {_describe(checkpoint.info)}, not as {_describe(info)}",
            "all ranks of one save must give the same name, step, kind and world size",
        )
    _check_local_ranks(checkpoint, event)
    contribution = checkpoint.contributions.get(event.rank)
    if contribution is not None and contribution.announced.path != event.path:
        raise _contradiction(
            f"rank {event.rank} of save {info.save} was announced from {contribution.announced.path} before",
            "use a new save id for every save",
        )
    if contribution is None and checkpoint.durable:
        raise _contradiction(
            f"save {info.save} is already {checkpoint.phase}, without rank {event.rank}",
            "announce every rank of a save with the same world_size and a local_world_size that counts them",
        )


def _check_local_ranks(checkpoint: Checkpoint, event: Announced) -> None:
    """Raise RequestError if the ranks that announce a save here disagree about which of them share a directory."""
    save, local_world_size = event.info.save, event.local_world_size
    hint = (
        "local_world_size counts the ranks that announce this save to this agent from the same directory, all with the "
        "same files; give 1 if each rank lists files of its own"
    )
    announced = [contribution.announced for contribution in checkpoint.contributions.values()]
    if announced[0].local_world_size != local_world_size:
        raise _contradiction(
            f"rank {event.rank} announces save {save} as one of {local_world_size} ranks here, "
            f"and rank {announced[0].rank} as one of {announced[0].local_world_size}",
            hint,
        )
    if local_world_size == 1 or event.rank in checkpoint.contributions:
        return
    if len(announced) >= local_world_size:
        raise _contradiction(
            f"save {save} already has its {local_world_size} local ranks, without rank {event.rank}", hint
        )
    first = next((one for one in announced if one.path == event.path), event)
    # Equal tuples, as they nearly always are, are compared without a set of 100,000 names.
    if first.files != event.files and set(first.files) != set(event.files):
        raise _contradiction(
            f"ranks {first.rank} and {event.rank} of save {save} list different files of {event.path}", hint
        )


def _contradiction(message: str, hint: str) -> RequestError:
    return RequestError(ErrorKind.CONTRADICTION, message, hint=hint)


def _describe(info: object) -> str:
    return repr(info).removeprefix("SaveInfo")


def announced(state: State, event: Announced) -> None:
    save = event.info.save
    checkpoint = state.checkpoints.get(save)
    if checkpoint is None or checkpoint.phase is Phase.FAILED:
        # A save that could not be staged may be announced again once its trainer has repaired it.
        checkpoint = Checkpoint(info=event.info, sequence=state.next_sequence, announced_at=event.at)
        state.checkpoints.pop(save, None)
        state.checkpoints[save] = checkpoint
        state.next_sequence += 1
    elif event.rank in checkpoint.contributions:
        # It was announced again while its records were not read.
        return
    else:
        checkpoint.move(Trigger.RANK_ANNOUNCED)
    checkpoint.contributions[event.rank] = RankContribution(announced=event)
    checkpoint.manifest_stored, checkpoint.least_left = False, None
    state.begun.pop(save, None)


def staged(state: State, checkpoint: Checkpoint, event: Staged) -> Iterator[Command]:
    lead = checkpoint.contributions[event.work.rank]
    if lead.staged:
        return
    yield from _fail_rewritten(state, checkpoint, event)
    lead.staged = True
    if checkpoint.phase is Phase.ANNOUNCED and lead.announced.recorded_at is not None:
        # As after a restart: an earlier agent may have stored some of it, or even have committed it.
        checkpoint.reconciled, checkpoint.may_have_orphans = False, True
    files = event.files
    lead.files = RankFiles(files, part_size_bytes=event.part_size_bytes, pack_size_bytes=event.pack_size_bytes)
    checkpoint.size_bytes += sum(files.sizes_bytes)
    checkpoint.file_count += len(files)
    upload_queue.enqueue_contribution(checkpoint, lead)
    came_before = state.staged_from(lead.announced.path, before=checkpoint) is not None
    state.note_staged(checkpoint, lead)
    others = set(lead.announced.others)
    copied = compress(files.paths, files.private)
    was_copied = any(path not in others for path in copied)
    if came_before and not checkpoint.info.is_snapshot and was_copied:
        # An earlier checkpoint was pinned from this path, and its files were rewritten in place. Other paths of the
        # series were not seen to be. A first copy proves nothing, because some volumes cannot link at all.
        state.rewritten_paths.add(lead.announced.path)
    if lead.shares_directory:
        # The first of the ranks contributes the files of the directory that they share; the others contribute none.
        for contribution in checkpoint.contributions.values():
            contribution.staged |= contribution.announced.path == lead.announced.path
    if not checkpoint.info.is_snapshot:
        state.recent_sizes_bytes.append(checkpoint.size_bytes)
    checkpoint.least_left = None
    checkpoint.move(Trigger.RANK_STAGED)


def _fail_rewritten(state: State, checkpoint: Checkpoint, event: Staged) -> Iterator[Command]:
    """Fail the checkpoints whose pinned inodes have other content in this one: the trainer rewrites files in place."""
    path = checkpoint.contributions[event.work.rank].announced.path
    for other, file in _rewritten_files(state, checkpoint, event):
        state.rewritten_paths.add(path)
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
    """Return each other checkpoint with one of its files that was rewritten in place before it was stored."""
    if not state.may_be_linked(event.files):
        return []
    now = {inode: stamp for _, inode, stamp in _linked_stamps(event.files)}
    rewritten = []
    for other in state.unfinished.values():
        for files in (contribution.files for contribution in other.contributions.values() if other is not checkpoint):
            if now.keys().isdisjoint(files.pinned.inodes):
                continue
            changed = (
                position
                for position, inode, stamp in _linked_stamps(files.pinned)
                if now.get(inode, stamp) != stamp and not files.is_stored(position)
            )
            first = next(changed, None)
            if first is not None:
                rewritten.append((other, files.pinned[first]))
                break
    return sorted(rewritten, key=lambda found: found[0].sequence)


def _linked_stamps(files: StagedFiles) -> Iterator[tuple[int, int, tuple[int, int]]]:
    """Yield (position, inode, (size, mtime)) of the files that share their inode with the trainer's."""
    columns = zip(files.inodes, files.private, files.sizes_bytes, files.mtimes_ns, strict=True)
    for position, (inode, private, size_bytes, mtime_ns) in enumerate(columns):
        if not private:
            yield position, inode, (size_bytes, mtime_ns)

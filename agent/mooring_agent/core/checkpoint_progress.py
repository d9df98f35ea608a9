"""How far a checkpoint has come: what a stored file, a look at the store or a loss changes in its files and queue.

Owns the counts that must agree (`durable_bytes`, `unstored_count`, the queue). Knows nothing of other checkpoints, of
the wire they share, or of what is decided from it.
"""

from mooring_agent.core import upload_queue
from mooring_agent.core.events import ObjectsLost, Reconciled
from mooring_agent.core.lifecycle import Trigger
from mooring_agent.core.state import Checkpoint, FileProgress
from mooring_agent.core.work import Operation, WorkId


def progress_of(checkpoint: Checkpoint, work: WorkId) -> FileProgress:
    """The file that a piece of work is about."""
    return checkpoint.shares[work.rank].files[work.path]


def store_file(checkpoint: Checkpoint, rank: int, path: str, checksum: int | None) -> None:
    """A file is stored; `checksum` is None where its parts told theirs, or it is empty."""
    share = checkpoint.shares[rank]
    progress = share.files[path]
    if progress.stored:
        return
    checkpoint.durable_bytes -= progress.durable_bytes
    progress.stored = True
    if checksum is not None:
        progress.checksums = {1: checksum}
    checkpoint.durable_bytes += progress.file.size_bytes
    share.unstored_count -= 1


def store_pack(checkpoint: Checkpoint, rank: int, number: int, checksums: tuple[int, ...]) -> None:
    """A pack is stored, and so are its files."""
    progress = checkpoint.shares[rank].packs[number]
    progress.stored = True
    for file, checksum in zip(progress.pack.files, checksums, strict=True):
        store_file(checkpoint, rank, file.path, checksum if file.size_bytes else None)


def take_up_found(checkpoint: Checkpoint, event: Reconciled) -> None:
    """Only what the store really has counts; the rest is sent again."""
    # Before the uploads are forgotten: a completed file's checksums are those of its parts.
    for file in event.files:
        store_file(checkpoint, file.rank, file.path, file.checksum)
    for share in checkpoint.shares.values():
        for progress in share.files.values():
            if not progress.stored:
                forget_upload(checkpoint, progress)
    for upload in event.uploads:
        progress = checkpoint.shares[upload.rank].files[upload.path]
        progress.upload_id = upload.upload_id
        for number, etag, checksum in upload.parts:
            progress.etags[number], progress.checksums[number] = etag, checksum
        checkpoint.durable_bytes += progress.durable_bytes
    checkpoint.pending.clear()
    for share in checkpoint.shares.values():
        upload_queue.enqueue_share(checkpoint, share)
    checkpoint.reconciled = True


def send_again(checkpoint: Checkpoint, event: ObjectsLost) -> None:
    """The store lost objects of ours."""
    for rank, path in event.files:
        progress = checkpoint.shares[rank].files[path]
        checkpoint.durable_bytes -= progress.durable_bytes
        progress.stored = False
        progress.upload_id = ""
        progress.etags, progress.checksums = {}, {}
        checkpoint.shares[rank].unstored_count += 1
        checkpoint.shares[rank].manifest_stored = False
        upload_queue.enqueue(checkpoint, rank, progress)
    for rank, number in event.packs:
        share = checkpoint.shares[rank]
        packed = share.packs[number]
        packed.stored = False
        for file in packed.pack.files:
            progress = share.files[file.path]
            checkpoint.durable_bytes -= progress.durable_bytes
            progress.stored, progress.checksums = False, {}
        share.unstored_count += len(packed.pack.files)
        share.manifest_stored = False
        upload_queue.enqueue_pack(checkpoint, rank, packed)
    for rank in event.manifests:
        checkpoint.shares[rank].manifest_stored = False
    checkpoint.move(Trigger.OBJECT_LOST)


def forget_upload(checkpoint: Checkpoint, progress: FileProgress) -> None:
    """A file begins anew: its multipart upload is gone."""
    checkpoint.durable_bytes -= progress.durable_bytes
    progress.upload_id = ""
    progress.etags, progress.checksums = {}, {}


def is_stale(checkpoint: Checkpoint, work: WorkId) -> bool:
    """Part of a multipart upload that the store lost meanwhile."""
    return bool(work.upload) and progress_of(checkpoint, work).upload_id != work.upload


def forget_commit_poll(checkpoint: Checkpoint) -> None:
    """Look at once, and often again."""
    work = WorkId(Operation.COMMIT, checkpoint.info.save)
    checkpoint.delayed.pop(work, None)
    checkpoint.attempts.pop(work, None)


def stop_sending(checkpoint: Checkpoint) -> None:
    """Nothing of it waits any more."""
    checkpoint.pending.clear()
    checkpoint.delayed.clear()
    checkpoint.attempts.clear()

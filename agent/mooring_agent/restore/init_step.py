"""`mooring restore`: runs before the trainer does.

Invariants: nothing appears under a checkpoint's name before every byte of it is verified and on disk; damage to one
checkpoint is reported, noted for prune, and leads to the next older one; trouble with the store or the disk leads to an
error; "nothing to resume from" is an answer only when the destination was read and has no commit marker, or when the
pin says so.
"""

import asyncio
import gc
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TypeVar, assert_never

import structlog

from mooring_agent.catalog.pruning import clear_damage, note_damage
from mooring_agent.catalog.reading import DAMAGE, CommittedCheckpoint, has_marker, list_committed, load
from mooring_agent.core.errors import ErrorKind, StoreError
from mooring_agent.core.policies.restore_choice import CommittedSave, GiveUp, Pin, StartFresh, Take, choose
from mooring_agent.core.stored.object_layout import check_token
from mooring_agent.ports import StoreWriter
from mooring_agent.restore.agreement import agree, read_pin
from mooring_agent.restore.download import download
from mooring_agent.restore.local_copy import LocalCopies

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger()
_Result = TypeVar("_Result")

Progress = Callable[[str, int, int], None]
"""Called with the checkpoint's name, the number of its bytes that are here, and its size in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """A checkpoint in its place. `skipped` says why each checkpoint tried before it was not taken."""

    path: Path
    name: str
    step: int
    save: str
    size_bytes: int
    downloaded: bool
    skipped: tuple[str, ...]


async def restore(
    store: StoreWriter,
    *,
    checkpoint_directory: Path,
    volume: Path,
    state_directory: Path,
    attempt: str = "",
    node_rank: int = 0,
    concurrency: int = 8,
    size_limit_bytes: int = 0,
    pin_timeout_seconds: float = 1800.0,
    on_progress: Progress = lambda name, done_bytes, total_bytes: None,
) -> Restored | None:
    """Put the newest restorable checkpoint into `checkpoint_directory`. Returns None if the run starts from nothing.

    With an `attempt`, all its pods get the same checkpoint. `size_limit_bytes` is the emptyDir's limit; 0 means none.
    Raises StoreError, VolumeError or RequestError; then only Mooring's own folder has changed. CHECKPOINT_CORRUPT means
    that there are checkpoints and none can be restored.
    """
    if attempt:
        check_token(attempt, "attempt")
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="mooring-restore-disk") as disk:
        step = _InitStep(
            store,
            LocalCopies(volume, checkpoint_directory, state_directory),
            partial(download, volume=volume, size_limit_bytes=size_limit_bytes, disk=disk, concurrency=concurrency),
            disk,
            on_progress,
        )
        return await step.run(attempt, node_rank, pin_timeout_seconds)


class _InitStep:
    """One restore. `_failures` maps the id of each save that was tried to what is wrong with it."""

    def __init__(
        self,
        store: StoreWriter,
        local: LocalCopies,
        fetch: Callable[..., Awaitable[None]],
        disk: Executor,
        on_progress: Progress,
    ) -> None:
        self._store = store
        self._local = local
        self._fetch = fetch
        self._disk = disk
        self._on_progress = on_progress
        self._failures: dict[str, str] = {}

    async def run(self, attempt: str, node_rank: int, pin_timeout_seconds: float) -> Restored | None:
        await self._on_disk(self._local.prepare)
        pin = await read_pin(self._store, attempt) if attempt else None
        while True:  # ends: a second round has the pin, and the pin does not change
            checkpoint, downloaded = await self._gather(pin)
            try:
                if attempt and pin is None:
                    pin = await agree(
                        self._store,
                        _pin_for(attempt, checkpoint),
                        node_rank=node_rank,
                        timeout_seconds=pin_timeout_seconds,
                    )
                    if pin != _pin_for(attempt, checkpoint):
                        _log.info("restore.follows_pin", attempt=attempt, step=pin.step, save=pin.save)
                        continue
                return await self._install(checkpoint, downloaded) if checkpoint else None
            finally:
                if checkpoint:
                    await self._on_disk(partial(self._local.discard, checkpoint))

    async def _gather(self, pin: Pin | None) -> tuple[CommittedCheckpoint | None, bool]:
        """Return the checkpoint to resume from, whole and verified on this disk, and whether it was downloaded."""
        committed = await list_committed(self._store)
        while True:  # ends: every round adds a failure, and `choose` gives up when all have failed
            choice = choose(committed, pin=pin, failures=self._failures)
            match choice:
                case StartFresh():
                    _log.info("restore.starts_fresh", because=choice.because)
                    return None, False
                case GiveUp():
                    raise StoreError(ErrorKind.CHECKPOINT_CORRUPT, choice.because, hint=choice.hint)
                case Take(committed=candidate):
                    _log.info("restore.tries", step=candidate.step, save=candidate.save, because=choice.because)
                    try:
                        return await self._gather_one(candidate)
                    except StoreError as error:
                        if error.kind not in (*DAMAGE, ErrorKind.MEMORY_SHORT, ErrorKind.FORMAT_UNKNOWN):
                            raise
                        damaged, reason = error.kind in DAMAGE, str(error)
                    # Outside the `except`: the error holds everything that was read of that checkpoint.
                    if damaged and not await has_marker(self._store, candidate):
                        # Retention deletes checkpoints that newer ones have replaced. A deleted one still counts as a
                        # failure: if none is left, somebody is emptying the destination, and that is no fresh start.
                        damaged, reason = False, f"{candidate.key} was deleted meanwhile"
                        listed = (*committed, *await list_committed(self._store))
                        committed = tuple({one.save: one for one in listed}.values())
                    await self._skip(candidate, reason, damaged=damaged)
                case _:
                    assert_never(choice)

    async def _skip(self, candidate: CommittedSave, reason: str, *, damaged: bool) -> None:
        """Skip a candidate, and note damage to it at the destination.

        Too little memory here, or a version of Mooring that is too old, says nothing about the checkpoint.
        """
        self._failures[candidate.save] = reason
        _log.warning("restore.skipped", step=candidate.step, save=candidate.save, reason=reason)
        # Reference cycles with errors and tasks would keep the checkpoint's values in memory beside the next one's.
        gc.collect()
        if damaged:
            await note_damage(self._store, candidate.save, reason)

    async def _gather_one(self, candidate: CommittedSave) -> tuple[CommittedCheckpoint, bool]:
        checkpoint = await load(self._store, candidate)
        if await self._on_disk(partial(self._local.holds, checkpoint)):
            # Its bytes at the destination were not read, so a note of damage to them stays.
            return checkpoint, False
        seen = _seen(checkpoint)
        try:
            await self._download(checkpoint)
        except StoreError as error:
            if error.kind not in DAMAGE:
                raise
            # A copy without the traceback, which holds what was read: there is no memory for that twice.
            damage = StoreError(error.kind, str(error), hint=error.hint)
        else:
            return checkpoint, True
        del checkpoint
        gc.collect()
        # Perhaps the files are right, and the listing or what was read of a small object was wrong: load it again.
        checkpoint = await load(self._store, candidate)
        if _seen(checkpoint) == seen:
            raise damage
        await self._download(checkpoint)
        return checkpoint, True

    async def _download(self, checkpoint: CommittedCheckpoint) -> None:
        """Download all of a checkpoint. Its bytes are then known to be good, so a note of damage to them goes."""
        try:
            await self._fetch(
                self._store,
                checkpoint,
                self._local.incoming(checkpoint),
                on_progress=partial(self._on_progress, checkpoint.marker.info.name),
            )
        except BaseException:
            await self._on_disk(partial(self._local.discard, checkpoint))
            raise
        await clear_damage(self._store, checkpoint.marker.info.save)

    async def _install(self, checkpoint: CommittedCheckpoint, downloaded: bool) -> Restored:
        await self._on_disk(partial(self._local.install if downloaded else self._local.record, checkpoint))
        info = checkpoint.marker.info
        size_bytes = checkpoint.size_bytes
        _log.info("restore.done", step=info.step, save=info.save, downloaded=downloaded, size_bytes=size_bytes)
        return Restored(
            path=self._local.place(checkpoint),
            name=info.name,
            step=info.step,
            save=info.save,
            size_bytes=size_bytes,
            downloaded=downloaded,
            skipped=tuple(self._failures.values()),
        )

    async def _on_disk(self, work: Callable[[], _Result]) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._disk, work)


def _seen(checkpoint: CommittedCheckpoint) -> bytes:
    """Return a digest of everything that was read or listed of a checkpoint.

    The marker has the checksums of all rank manifests.
    """
    digest = sha256(repr(checkpoint.marker).encode())
    for file in checkpoint.files:
        digest.update(f"{file.key}\n{file.version}\n{file.object_bytes}\n".encode())
    return digest.digest()


def _pin_for(attempt: str, checkpoint: CommittedCheckpoint | None) -> Pin:
    if checkpoint is None:
        return Pin(attempt=attempt)
    committed = checkpoint.committed
    return Pin(attempt=attempt, step=committed.step, save=committed.save, marker=committed.key)

"""`keepstep restore`: runs before the trainer does.

Invariants: nothing appears under a checkpoint's name before every byte of it is verified and on disk; "nothing to
resume from" is an answer only when the destination was read and has no commit marker, or when the pin says so. What
becomes of damaged checkpoints is in `candidates`.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import structlog

from keepstep_agent.adapters.volume.work_note import WorkNote
from keepstep_agent.catalog.damage import clear_damage
from keepstep_agent.catalog.markers import list_committed, with_last_commits
from keepstep_agent.catalog.object_reads import for_each
from keepstep_agent.catalog.reading import CommittedCheckpoint
from keepstep_agent.catalog.weights_only import refuse_fresh_start
from keepstep_agent.core.limits import PIN_MARKERS
from keepstep_agent.core.policies.restore_choice import CommittedSave, Pin, by_line, last_commit_at, pin_of
from keepstep_agent.core.stored.object_layout import check_token
from keepstep_agent.ports import StoreWriter
from keepstep_agent.restore.agreement import Agreement
from keepstep_agent.restore.candidates import Candidates
from keepstep_agent.restore.download import download
from keepstep_agent.restore.local_copy import LocalCopies
from keepstep_agent.restore.partial_copy import PartialCopy
from keepstep_agent.restore.predecessors import Predecessors

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
    place: str = "",
    node_rank: int = 0,
    concurrency: int = 8,
    size_limit_bytes: int = 0,
    pin_timeout_seconds: float = 1800.0,
    predecessors: Predecessors | None = None,
    note: WorkNote | None = None,
    on_progress: Progress = lambda name, done_bytes, total_bytes: None,
) -> tuple[Restored, ...]:
    """Put the newest restorable checkpoint of each output directory into its place.

    Returns the one that was saved last first; none if the run starts from nothing.

    With an `attempt`, all pods of a start of it get the same ones. `place` is the pod's in the job, the same for its
    replacement; it tells the next start from this one. `size_limit_bytes` is the emptyDir's limit; 0 means none.
    `predecessors`: whom to wait for before this start chooses; None: nobody. `note`: of what is restored.

    Raises StoreError, VolumeError or RequestError; then only Keepstep's own folder has changed. CHECKPOINT_CORRUPT
    means that an output directory has checkpoints and none of them can be restored.
    """
    for name, word in (("attempt", attempt), ("place", place)):
        if word:
            check_token(word, name)
    agreement = (
        Agreement(
            store,
            attempt,
            partial(list_committed, store),
            place=place,
            node_rank=node_rank,
            timeout_seconds=pin_timeout_seconds,
        )
        if attempt
        else None
    )
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="keepstep-restore-disk") as disk:
        local = LocalCopies(volume, checkpoint_directory, state_directory)
        step = _InitStep(
            store,
            local,
            partial(download, volume=volume, size_limit_bytes=size_limit_bytes, disk=disk, concurrency=concurrency),
            partial(
                _complete,
                local=local,
                volume=volume,
                size_limit_bytes=size_limit_bytes,
                disk=disk,
                concurrency=concurrency,
            ),
            disk,
            predecessors,
            note,
            on_progress,
        )
        return await step.run(attempt, agreement)


class _InitStep:
    """One restore."""

    def __init__(
        self,
        store: StoreWriter,
        local: LocalCopies,
        fetch: Callable[..., Awaitable[None]],
        complete: Callable[..., Awaitable[None]],
        disk: Executor,
        predecessors: Predecessors | None,
        note: WorkNote | None,
        on_progress: Progress,
    ) -> None:
        self._store = store
        self._local = local
        self._fetch = fetch
        self._complete = complete
        self._disk = disk
        self._predecessors = predecessors
        self._note = note
        self._on_progress = on_progress
        self._gathered: list[tuple[CommittedCheckpoint, bool]] = []
        """What is whole and verified on this disk, and whether it was downloaded."""
        self._skipped: dict[str, tuple[str, ...]] = {}

    async def run(self, attempt: str, agreement: Agreement | None) -> tuple[Restored, ...]:
        await self._on_disk(self._local.prepare)
        while True:  # ends: another round follows only if another pod has begun a generation meanwhile
            pin = await agreement.join() if agreement else None
            if pin is None and self._predecessors is not None:
                await self._predecessors.wait(self._store)
            try:
                await self._gather(pin)
                wish = pin_of(attempt, [checkpoint.committed for checkpoint, _ in self._gathered])
                if agreement and pin is None and not await agreement.begin(wish):
                    _log.info("restore.follows_another_pod", attempt=attempt)
                    continue
                # The last one is noted as what this volume resumes from.
                ordered = sorted(self._gathered, key=lambda one: one[0].marker.saved_at)
                restored = [await self._install(checkpoint, downloaded) for checkpoint, downloaded in ordered]
                if agreement:
                    await agreement.take_place()
                return tuple(reversed(restored))
            finally:
                for checkpoint, _ in self._gathered:
                    await self._on_disk(partial(self._local.discard, checkpoint))
                self._gathered.clear()

    async def _gather(self, pin: Pin | None) -> None:
        """Gather the checkpoints to resume from, one of each output directory."""
        committed = await self._committed()
        if not committed and pin is None:
            await refuse_fresh_start(self._store)
        pins: Mapping[str, Pin | None] = pin.of_outputs() if pin is not None else dict.fromkeys(committed)
        if not pins:
            _log.info("restore.starts_fresh", because="pinned to step 0" if pin else "nothing is committed")
        for key, pinned in pins.items():

            async def relist(key: str = key) -> Sequence[CommittedSave]:
                return (await self._committed()).get(key, ())

            candidates = Candidates(self._store, relist, self._note)
            found = await candidates.first(committed.get(key, ()), self._gather_one, pin=pinned)
            if found is not None:
                self._gathered.append(found)
                self._skipped[found[0].marker.info.save] = tuple(candidates.failures.values())

    async def _committed(self) -> Mapping[str, Sequence[CommittedSave]]:
        """Return the committed checkpoints of each output directory, by its key: of those that were saved to last."""
        committed = await list_committed(self._store)
        lines = by_line(committed)
        if len(lines) > PIN_MARKERS:
            lines = by_line(await with_last_commits(self._store, committed))
            _log.warning("restore.leaves_out", output_directories=len(lines) - PIN_MARKERS)
        last = sorted(lines.items(), key=lambda line: last_commit_at(line[1]), reverse=True)
        return {key: found for (_, key), found in last[:PIN_MARKERS]}

    async def _gather_one(self, checkpoint: CommittedCheckpoint) -> tuple[CommittedCheckpoint, bool]:
        if await self._on_disk(partial(self._local.holds, checkpoint)):
            # Its bytes at the destination were not read, so a note of damage to them stays.
            return checkpoint, False
        await self._download(checkpoint)
        return checkpoint, True

    async def _download(self, checkpoint: CommittedCheckpoint) -> None:
        """Download all of a checkpoint. Its bytes are then known to be good, so a note of damage to them goes."""
        on_progress = partial(self._on_progress, checkpoint.marker.info.name)
        try:
            if await self._on_disk(partial(self._local.is_recorded, checkpoint)):
                await self._complete(self._store, checkpoint, on_progress=on_progress)
            else:
                incoming = self._local.incoming(checkpoint)
                await self._fetch(self._store, checkpoint, incoming, on_progress=on_progress)
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
            skipped=self._skipped[info.save],
        )

    async def _on_disk(self, work: Callable[[], _Result]) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._disk, work)


async def _complete(
    store: StoreWriter,
    checkpoint: CommittedCheckpoint,
    *,
    local: LocalCopies,
    volume: Path,
    size_limit_bytes: int,
    disk: Executor,
    concurrency: int,
    on_progress: Callable[[int, int], None],
) -> None:
    """Download what this volume lacks of a checkpoint that its pod has contributed to, or that was damaged here."""
    copy = PartialCopy(store, checkpoint, local, volume, disk)
    await copy.prepare()
    pieces = copy.all_pieces()
    await copy.check_room([pieces], size_limit_bytes)
    total_bytes = copy.pieces.size_bytes([pieces])
    done_bytes = 0

    async def bring(piece: int) -> None:
        nonlocal done_bytes
        await copy.bring(piece)
        done_bytes += copy.pieces.size_bytes([range(piece, piece + 1)])
        on_progress(done_bytes, total_bytes)

    await for_each(pieces, bring, at_once=concurrency)
    await copy.make_durable()

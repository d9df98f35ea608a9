"""Restores the newest snapshots: the files of programs that announce nothing, in the directories where they were.

A pod gets the newest snapshot of its own node, and of every other node's newest snapshot the files that its own does
not have: as on a shared filesystem, where rank 0 writes and all read. Snapshots do not follow the attempt's pin. Nodes
that do not know of each other commit by themselves, so no snapshot of one node belongs to one of another, and each pod
takes the newest of all.

Invariants: everything is downloaded and verified before the first file is put in place; damage to one snapshot leads to
the next older one of its series; the mirror's base is written last, so an interrupted restore begins again.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Final, TypeVar

import structlog

from keepstep_agent.adapters.output.announced_paths import AnnouncedPaths
from keepstep_agent.adapters.output.mirror_state import read_base, write_base
from keepstep_agent.adapters.output.output_directories import OutputDirectories
from keepstep_agent.adapters.volume.errors import volume_error
from keepstep_agent.adapters.volume.work_note import WorkNote
from keepstep_agent.catalog.damage import clear_damage, passed_over
from keepstep_agent.catalog.markers import list_snapshots
from keepstep_agent.catalog.reading import CommittedCheckpoint
from keepstep_agent.core.errors import ErrorKind, StoreError, VolumeError
from keepstep_agent.core.mirror.base import MirrorBase, series_of
from keepstep_agent.core.model import Fingerprint
from keepstep_agent.core.policies.restore_choice import CommittedSave
from keepstep_agent.ports import StoreWriter
from keepstep_agent.restore.candidates import Candidates
from keepstep_agent.restore.download import download
from keepstep_agent.restore.init_step import Progress
from keepstep_agent.restore.output_files import OutputFiles, Placed
from keepstep_agent.restore.predecessors import Predecessors
from keepstep_agent.restore.snapshot_selection import (
    Selection,
    TakenPaths,
    entries_of,
    is_newer,
    label_of,
    next_base,
    select_other,
    select_own,
    snapshot_id,
)
from keepstep_agent.restore.strange_files import ASIDE_SUFFIX
from keepstep_api.names import ANNOTATION_PREFIX

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger()
_Result = TypeVar("_Result")

_SHOWN_NAMES: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoredSnapshot:
    """What was taken of one node's snapshot. Its `number` is when it was taken, in unix seconds.

    `put_in_place`: all that it has for one of `directories`; otherwise only what was broken or outdated there.
    """

    series: str
    save: str
    number: int
    files: int
    size_bytes: int
    put_in_place: bool
    directories: tuple[Path, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoredSnapshots:
    """What was restored of all snapshots, this node's own first.

    `left` are the directories that have this run's files. `skipped` says why each snapshot tried before was not taken.
    """

    snapshots: tuple[RestoredSnapshot, ...]
    left: tuple[Path, ...]
    warnings: tuple[str, ...]
    skipped: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gathered:
    """What was selected of a snapshot; the files lie in the folder `source` of the volume."""

    committed: CommittedSave
    selection: Selection
    source: str


async def restore_snapshots(
    store: StoreWriter,
    *,
    volume: Path,
    directories: Sequence[str],
    state_directory: Path,
    checkpoint_directory: Path,
    node_rank: int = 0,
    fall_back_after: int = 0,
    concurrency: int = 8,
    size_limit_bytes: int = 0,
    predecessors: Predecessors | None = None,
    note: WorkNote | None = None,
    on_progress: Progress = lambda name, done_bytes, total_bytes: None,
) -> RestoredSnapshots | None:
    """Put the files of the newest snapshots into the output directories. Returns None if there is no snapshot.

    `fall_back_after`: after so many starts in a row that failed early with the newest snapshot of this node, the one
    before is taken; 0: never.
    `size_limit_bytes` is the emptyDir's limit; 0 means none. `predecessors`: whom to wait for before the newest of the
    snapshots that there are is chosen; None: nobody. `note`: of what is restored.
    Raises StoreError, VolumeError or RequestError.
    CHECKPOINT_CORRUPT means that there are snapshots of a node and none can be restored.
    """
    if not directories:
        return None
    committed = await list_snapshots(store)
    if committed and predecessors is not None:
        await predecessors.wait(store)
        committed = await list_snapshots(store)
    if not committed:
        return None
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="keepstep-restore-disk") as disk:
        restoring = _SnapshotRestore(
            store,
            OutputFiles(volume, directories, state_directory),
            partial(download, volume=volume, size_limit_bytes=size_limit_bytes, disk=disk, concurrency=concurrency),
            disk,
            note,
            on_progress,
        )
        base = await restoring.on_disk(partial(read_base, volume, state_directory))
        own = series_of(node_rank)
        skipped = await passed_over(store, committed, node_rank=node_rank, after=fall_back_after)
        try:
            if _falls_back(base, committed.get(own, ()), skipped):
                output = OutputDirectories(volume, directories)
                announced = AnnouncedPaths(volume, checkpoint_directory, state_directory, output)
                base = await restoring.fall_back(committed, own, base, skipped, announced)
            else:
                await restoring.gather(committed, own, base, skipped)
            if base.files and base.snapshot is None:
                # From here on, until it is done, any snapshot is to replace what is here.
                await restoring.on_disk(partial(_write_base, volume, state_directory, base))
                await restoring.on_disk(partial(restoring.clear, base))
            following = await restoring.on_disk(partial(restoring.put, base))
            if following is not None:
                await restoring.on_disk(partial(_write_base, volume, state_directory, following))
        finally:
            await restoring.discard()
        return restoring.result()


class _SnapshotRestore:
    """One restore: `gather`, then `put`."""

    def __init__(
        self,
        store: StoreWriter,
        output: OutputFiles,
        fetch: Callable[..., Awaitable[None]],
        disk: Executor,
        note: WorkNote | None,
        on_progress: Progress,
    ) -> None:
        self._note = note
        self._store = store
        self._output = output
        self._fetch = fetch
        self._disk = disk
        self._on_progress = on_progress
        self._own: CommittedCheckpoint | None = None
        self._gathered: list[_Gathered] = []
        self._fetched: set[str] = set()
        self._warnings: list[str] = []
        self._skipped: list[str] = []

    async def gather(
        self,
        committed: dict[str, tuple[CommittedSave, ...]],
        own: str,
        base: MirrorBase,
        skipped: Mapping[str, str],
    ) -> None:
        """Download what is needed of the newest snapshot of each series, the own one first.

        `skipped`: snapshots that are taken only if no other of their series can be, and why.
        """
        await self.on_disk(self._output.prepare)
        if own in committed:
            is_known = base.snapshot is not None and base.snapshot.series == own

            async def take_own(checkpoint: CommittedCheckpoint) -> _Gathered:
                gathered = await self._take(checkpoint, partial(select_own, self._output, base))
                self._own = checkpoint
                return gathered

            await self._gather_series(committed[own], take_own, must=not is_known, skipped=skipped)
        own_id = snapshot_id(self._own) if self._own else None
        taken = TakenPaths()
        if self._own is not None:
            taken.add(entry.path for entry in entries_of(self._own))
        if not (own_id and is_newer(own_id, base)):
            taken.add((*base.files, *base.links))
        for series, saves in committed.items():
            if series == own:
                continue
            paths: list[str] = []

            async def take_other(checkpoint: CommittedCheckpoint, paths: list[str] = paths) -> _Gathered:
                select = partial(select_other, self._output, base, own_id, taken, self._conflicts())
                gathered = await self._take(checkpoint, select)
                paths[:] = [entry.path for entry in entries_of(checkpoint)]
                return gathered

            must = not (base.snapshot or base.others)
            await self._gather_series(saves, take_other, must=must, skipped=skipped)
            taken.add(paths)

    async def fall_back(
        self,
        committed: dict[str, tuple[CommittedSave, ...]],
        own: str,
        base: MirrorBase,
        skipped: Mapping[str, str],
        announced: AnnouncedPaths,
    ) -> MirrorBase:
        """Gather a snapshot that is older than the one that is here, if it can take the place of all that is there.

        Return the base of directories in which that may be done. It is the same base, with a warning, if anything is
        there that no snapshot has, or is in the way.
        """
        left_out = await self.on_disk(partial(announced.find, ()))
        strays = await self.on_disk(partial(self._output.strays, base, left_out))
        reason = f"no snapshot has {_some([str(path) for path in strays])}" if strays else ""
        if not reason:
            replaceable = replace(base, snapshot=None)
            try:
                await self.gather(committed, own, replaceable, skipped)
            except VolumeError as error:
                reason = str(error)
                self._own, self._gathered = None, []
            else:
                return replaceable
        self._warnings.append(
            f"programs have failed with the newest snapshot, but the one before it is not restored: {reason}; to have "
            "it restored, move away what is there"
        )
        saves = {one.save for one in committed[own]}
        await self.gather(committed, own, base, {save: why for save, why in skipped.items() if save not in saves})
        return base

    def clear(self, base: MirrorBase) -> None:
        """Remove what the snapshot does not have that is about to take the place of the base's."""
        if self._own is not None:
            self._output.clear(base, {*base.others, *(entry.path for entry in entries_of(self._own))})

    def put(self, base: MirrorBase) -> MirrorBase | None:
        """Put everything in place that was gathered. Return the base that follows; None if nothing has changed."""
        conflicts = self._conflicts()
        self._gathered = [replace(one, selection=one.selection.without(conflicts)) for one in self._gathered]
        looks: dict[str, Fingerprint] = self._output.put(
            [
                Placed(entry=entry, source=source, keeps_old=entry.path in one.selection.strange)
                for one in self._gathered
                for entries, source in ((one.selection.wanted, one.source), (one.selection.here, ""))
                for entry in entries
            ]
        )
        here = {*base.files, *(entry.path for entry in (entries_of(self._own) if self._own else ()))}
        self._output.mark_unread(path for path in here if label_of(path) in self._output.directories)
        self._warn()
        if not any(one.selection.chosen for one in self._gathered):
            return None
        own = self._gathered[0].selection if self._own else None
        others = self._gathered[1:] if self._own else self._gathered
        return next_base(base, self._own, own, looks, (entry.path for one in others for entry in one.selection.chosen))

    def result(self) -> RestoredSnapshots:
        left = {label for one in self._gathered for label in one.selection.left}
        return RestoredSnapshots(
            snapshots=tuple(self._restored(one) for one in self._gathered),
            left=tuple(path for label, path in self._output.directories.items() if label in left),
            warnings=tuple(self._warnings),
            skipped=tuple(self._skipped),
        )

    async def discard(self) -> None:
        """Remove what was downloaded and not put in place."""
        for series in self._fetched:
            await asyncio.shield(self.on_disk(partial(self._output.discard, series)))

    async def on_disk(self, work: Callable[[], _Result]) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._disk, work)

    async def _gather_series(
        self,
        committed: Sequence[CommittedSave],
        take: Callable[[CommittedCheckpoint], Awaitable[_Gathered]],
        *,
        must: bool,
        skipped: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Gather the newest snapshot of a series that can be restored. Without `must` it is no error if none can."""
        series = committed[0].series

        async def relist() -> Sequence[CommittedSave]:
            return (await list_snapshots(self._store)).get(series, ())

        candidates = Candidates(self._store, relist, self._note)
        candidates.failures |= {one.save: skipped[one.save] for one in committed if one.save in skipped}
        try:
            gathered = await candidates.first(committed, take)
        except StoreError as error:
            if candidates.failures.keys() & skipped.keys() and error.kind is ErrorKind.CHECKPOINT_CORRUPT:
                await self._gather_series(committed, take, must=must)
                return
            if must or error.kind is not ErrorKind.CHECKPOINT_CORRUPT:
                raise
            self._warnings.append(f"of {series} {error}; what is here stays as it is")
            return
        self._skipped += [reason for save, reason in candidates.failures.items() if save not in skipped]
        newer = [one for one in committed if one.save in skipped and gathered and one.step > gathered.committed.step]
        if newer:
            which = f"snapshot {newer[0].save}" + (f" and {len(newer) - 1} before it" if newer[1:] else "")
            self._skipped.append(f"{which}: {skipped[newer[0].save]}")
        if gathered is not None:
            self._gathered.append(gathered)

    async def _take(
        self, checkpoint: CommittedCheckpoint, select: Callable[[CommittedCheckpoint], Selection]
    ) -> _Gathered:
        info = checkpoint.marker.info
        selection = await self.on_disk(partial(select, checkpoint))
        wanted = {entry.path for entry in selection.wanted}
        files = checkpoint.files.only(wanted.__contains__)
        source = self._output.incoming(info.name, info.save)
        if files:
            _log.info("restore.snapshot", series=info.name, number=info.step, save=info.save, files=len(files))
            self._fetched.add(info.name)
            try:
                await self._fetch(
                    self._store,
                    replace(checkpoint, files=files),
                    source,
                    on_progress=partial(self._on_progress, f"snapshot of {info.name}"),
                )
            except BaseException:
                # Now, because the next older snapshot needs the space.
                await self.on_disk(partial(self._output.discard, info.name))
                raise
            if len(files) == len(checkpoint.files):
                await clear_damage(self._store, info.save)
        return _Gathered(committed=checkpoint.committed, selection=selection, source=source)

    def _restored(self, gathered: _Gathered) -> RestoredSnapshot:
        committed, selection = gathered.committed, gathered.selection
        labels = {label_of(entry.path) for entry in selection.chosen}
        return RestoredSnapshot(
            series=committed.series,
            save=committed.save,
            number=committed.step,
            files=len(selection.chosen),
            size_bytes=sum(entry.size_bytes for entry in selection.chosen),
            put_in_place=bool(labels - selection.left),
            directories=tuple(path for label, path in self._output.directories.items() if label in labels),
        )

    def _conflicts(self) -> dict[str, str]:
        return {label: path for one in self._gathered for label, path in one.selection.conflicts.items()}

    def _warn(self) -> None:
        selections = [one.selection for one in self._gathered]
        for label, path in self._conflicts().items():
            self._warnings.append(
                f"{self._output.directories[label]} is not as the newest snapshot has it "
                f"(e.g. {self._output.place(path)}): it is left alone; remove what is in the way, or the directory, to "
                "have the snapshot restored"
            )
        if unknown := {label for one in selections for label in one.unknown}:
            self._warnings.append(
                f"the snapshot has files of {_some(unknown)}, which is not watched: they are not restored; "
                f"give the directory with --watch (in a pod {ANNOTATION_PREFIX}output)"
            )
        if reserved := {str(self._output.place(path)) for one in selections for path in one.reserved}:
            self._warnings.append(
                f"Keepstep keeps its own files where the snapshot has {_some(reserved)}: not restored"
            )
        if strange := {str(self._output.place(path)) for one in selections for path in one.strange}:
            self._warnings.append(
                f"no record of Keepstep's names the files that were in the places of {_some(strange)}: they are beside "
                f"these now, and their names end in {ASIDE_SUFFIX}; remove what you do not need"
            )
        if broken := {str(self._output.place(path)) for one in selections for path in one.broken}:
            self._warnings.append(
                f"{_some(broken)} was not complete, as its format shows: it is replaced by what the snapshot has"
            )


def _falls_back(base: MirrorBase, saves: Sequence[CommittedSave], skipped: Mapping[str, str]) -> bool:
    """Whether what is here is of a snapshot that is passed over, and there is no newer one that is not."""
    if base.snapshot is None or base.snapshot.save not in skipped:
        return False
    newest = next((one.step for one in saves if one.save not in skipped), None)
    return newest is not None and newest < base.snapshot.number


def _some(names: Collection[str]) -> str:
    more = f" (and {len(names) - _SHOWN_NAMES} more)" if len(names) > _SHOWN_NAMES else ""
    return ", ".join(sorted(names)[:_SHOWN_NAMES]) + more


def _write_base(volume: Path, state_directory: Path, base: MirrorBase) -> None:
    try:
        write_base(volume, state_directory, base)
    except OSError as error:
        raise volume_error(error, f"writing the state directory {state_directory}") from error

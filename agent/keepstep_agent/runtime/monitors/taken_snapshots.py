"""Remembers the snapshots of this volume: what the newest stored one holds, and which are on their way.

The base, with the saves that are on their way, is kept in the state directory before a snapshot is announced and when
one is committed, so that neither a restart of the agent nor a restore takes it for another machine's.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import structlog

from keepstep_agent.adapters.output.mirror_state import read_base, write_base
from keepstep_agent.core.agent.checkpoint import Checkpoint
from keepstep_agent.core.agent.events import SnapshotNoted
from keepstep_agent.core.agent.state import State
from keepstep_agent.core.errors import ErrorKind
from keepstep_agent.core.mirror.base import HeldFile, HeldFiles, MirrorBase, held_files
from keepstep_agent.core.mirror.output_scan import OutputScan
from keepstep_agent.core.mirror.plan import SnapshotPlan
from keepstep_agent.core.mirror.write_groups import Kinds, saves_by_name
from keepstep_agent.core.model import FileEntry, Fingerprint
from keepstep_agent.core.settings.values import Settings
from keepstep_agent.runtime.engine.engine import Engine

_AFTER_FAILURE_SECONDS: Final = 30.0
# The next one may be taken at once: it sends everything, or the files are quiet by then.
_HARMLESS: Final = frozenset({ErrorKind.BASE_PRUNED, ErrorKind.FILE_CHANGED, ErrorKind.FILE_MISSING})

log = structlog.get_logger("keepstep.mirror")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Taken:
    """A snapshot on its way: what its files look like here, and the look that it was planned from."""

    looks: Mapping[str, Fingerprint]
    links: Mapping[str, str]
    scan: OutputScan | None = None


class TakenSnapshots:
    """The snapshots that were taken of one volume.

    Attributes:
        base: What the newest stored one holds.
        stored: What the files look like that it holds or that are on their way.
        not_pinned: Files of the newest stored one that changed before they could be pinned.
        pinned: What the files of the last snapshots looked like, even of those that failed.
    """

    def __init__(self, *, engine: Engine, settings: Settings, executor: Executor) -> None:
        self._engine = engine
        self._executor = executor
        self._volume, self._state_directory = Path(settings.volume), Path(settings.state_directory)
        self._taken: dict[str, _Taken] = {}
        # `on_their_way` when `stored` was noted.
        self._waited_for: Sequence[str] = ()
        self.base = MirrorBase()
        self.stored: Mapping[str, Fingerprint] = {}
        self.not_pinned: frozenset[str] = frozenset()
        self.pinned: dict[str, Fingerprint] = {}

    @property
    def on_their_way(self) -> Sequence[str]:
        """The saves of the snapshots that have not ended, as far as `settle` knows, and that the next one waits for.

        It does not wait for one that is set aside, unless two were with nothing stored in between: then it is not the
        file that the store refuses.
        """
        state = self._engine.state
        aside = {save: state.set_aside[save].set_aside for save in self._taken if save in state.set_aside}
        in_vain = [why for why in aside.values() if why is not None and why.at >= state.progress_at]
        return tuple(save for save in self._taken if save not in aside or len(in_vain) > 1)

    @property
    def refused(self) -> Mapping[str, str]:
        """The files because of which a snapshot is set aside, and why: the next one leaves them out."""
        aside = (one.set_aside for save, one in self._engine.state.set_aside.items() if save in self._taken)
        return {why.path: why.reason for why in aside if why is not None and why.path}

    @property
    def last_number(self) -> int:
        """The highest number of this volume's snapshots; 0 if there is none."""
        last = self.base.snapshot.number if self.base.snapshot else 0
        return max([last, *(self._engine.state.checkpoints[save].info.step for save in self._taken)])

    def are_of(self, scan: OutputScan) -> bool:
        """Whether a snapshot of just this look is on its way."""
        return any(taken.scan == scan for taken in self._taken.values())

    async def begin(self) -> None:
        """Read what is stored of this volume, and find the snapshots that an earlier agent has left on their way."""
        self.base = await asyncio.get_running_loop().run_in_executor(
            self._executor, read_base, self._volume, self._state_directory
        )
        if self.base.snapshot is None:
            # A restore that was to put another one in place was interrupted, and nobody has repeated it.
            self.base = replace(self.base, files=HeldFiles(), links={})
        state = self._engine.state
        # If it was not on its way then, restore has put another one in place since.
        if state.newest_snapshot is not None and state.newest_snapshot.info.save in self.base.pending:
            await self._keep(state.newest_snapshot, self._taken_before(state.newest_snapshot))
        for save, checkpoint in state.unfinished.items():
            if checkpoint.info.is_snapshot:
                self._taken[save] = self._taken_before(checkpoint)
        if state.newest_snapshot is not None:
            await self._tell_noted(state.newest_snapshot)
        self.pinned = self.base.files.looks()
        self._note_stored()

    def groups_before(self) -> Iterator[Kinds]:
        """Yield the kinds of the files of each save, of those that the base holds, in the order of time.

        What was sent together may have been of several. Takes seconds for 100,000 files.
        """
        sent: dict[str, list[tuple[int, str]]] = {}
        for path, held in self.base.files.items():
            save = held.entry.owner.save if held.entry.owner else ""
            sent.setdefault(save, []).append((held.fingerprint.mtime_ns, path))
        for files in sent.values():
            files.sort()
        in_order = sorted(sent.values(), key=lambda files: files[-1])
        for files in in_order:
            yield from saves_by_name(path for _, path in files)

    async def add(self, save: str, plan: SnapshotPlan, scan: OutputScan) -> None:
        """Note a snapshot that is about to be announced."""
        self._taken[save] = _Taken(
            looks=plan.looks, links={one.path: one.link for one in plan.content.kept if one.link}, scan=scan
        )
        self.base = replace(self.base, pending=frozenset(self._taken))
        await self._write_base()
        self.pinned |= {file.path: file.fingerprint for file in plan.content.files}
        self._note_stored()

    async def settle(self) -> float | None:
        """Take note of the snapshots that have ended.

        Returns the seconds to wait before the next one if one of them came to nothing, else None.
        """
        pause_seconds: float | None = None
        state = self._engine.state
        for save in [save for save in self._taken if is_over(state, save)]:
            taken, checkpoint = self._taken.pop(save), state.checkpoints.get(save)
            if checkpoint is not None and checkpoint.durable:
                await self._keep(checkpoint, taken)
                await self._tell_noted(checkpoint)
                continue
            kind = checkpoint.error_kind if checkpoint is not None else None
            if kind is ErrorKind.BASE_PRUNED:
                self.base = replace(self.base, snapshot=None, files=HeldFiles(), links={})
            pause_seconds = 0.0 if kind in _HARMLESS else _AFTER_FAILURE_SECONDS
        if self.on_their_way != self._waited_for:
            self._note_stored()
        return pause_seconds

    def _note_stored(self) -> None:
        self._waited_for = self.on_their_way
        newest = [self._taken[save] for save in self._waited_for[-1:]]
        looks = newest[0].looks if newest else self.base.files.looks()
        others = {path: seen for path, seen in self.base.others.items() if path not in looks}
        self.stored = {**looks, **others} if others else looks

    def _taken_before(self, checkpoint: Checkpoint) -> _Taken:
        """Return what is known of a snapshot that an earlier agent took."""
        snapshot = checkpoint.contributions[0].announced.snapshot
        assert snapshot is not None
        kept = {entry.path: held.fingerprint for entry in snapshot.kept if (held := self._held(entry)) is not None}
        sent = {source.path: source.fingerprint for source in snapshot.files}
        return _Taken(looks={**kept, **sent}, links={one.path: one.link for one in snapshot.kept if one.link})

    def _held(self, entry: FileEntry) -> HeldFile | None:
        held = self.base.files.get(entry.path)
        return held if held is not None and held.entry == entry else None

    async def _keep(self, checkpoint: Checkpoint, taken: _Taken) -> None:
        """Make a committed snapshot the base of the next one, unless a later one is it already."""
        if self.base.snapshot is not None and self.base.snapshot.number >= checkpoint.info.step:
            return
        looks = self._stored_looks(checkpoint, taken)
        self.base = MirrorBase(
            snapshot=checkpoint.snapshot_id,
            files=HeldFiles(held_files(checkpoint.manifest(0), looks)),
            others={path: seen for path, seen in self.base.others.items() if path not in looks},
            links=taken.links,
            pending=frozenset(self._taken),
        )
        await self._write_base()

    async def _tell_noted(self, checkpoint: Checkpoint) -> None:
        await self._engine.submit(SnapshotNoted(at=self._engine.state.now, save=checkpoint.info.save))

    def _stored_looks(self, checkpoint: Checkpoint, taken: _Taken) -> Mapping[str, Fingerprint]:
        """Note which files could not be pinned. Return what the files of a snapshot look like here, those as before."""
        (contribution,) = checkpoint.contributions.values()
        snapshot = contribution.announced.snapshot
        assert snapshot is not None
        self.not_pinned = frozenset(file.path for file in snapshot.files if file.path not in contribution.files)
        if not self.not_pinned:
            return taken.looks
        looks = {path: seen for path, seen in taken.looks.items() if path not in self.not_pinned}
        held = {entry.path: self._held(entry) for entry in snapshot.instead}
        return {path: one.fingerprint for path, one in held.items() if one is not None} | looks

    async def _write_base(self) -> None:
        try:
            await asyncio.get_running_loop().run_in_executor(
                self._executor, write_base, self._volume, self._state_directory, self.base
            )
        except OSError as error:
            log.warning("mirror.base_not_kept", error=str(error), hint="after a restart more is sent again")


def is_over(state: State, save: str) -> bool:
    """Whether nothing is left to upload or commit of a save."""
    checkpoint = state.checkpoints.get(save)
    return checkpoint is None or checkpoint.ended

"""Selects which files of a snapshot restore puts in place, by what this volume holds already.

What the program has written here since it was last restored is newer than any snapshot, so a restarted container finds
its directories as it left them. Which directories those are, the mirror's base tells: agent and restore write it, and
it is lost together with the volume. See `Treatment` for the rules.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from keepstep_agent.catalog.reading import CommittedCheckpoint
from keepstep_agent.core.mirror.base import HeldFiles, MirrorBase, held_files
from keepstep_agent.core.mirror.output_scan import folders_above
from keepstep_agent.core.model import FileEntry, Fingerprint, SnapshotId
from keepstep_agent.restore.output_files import EntryKind, Look, OutputFiles, in_the_way


class Treatment(StrEnum):
    """What happens to an output directory.

    FILL: The base knows no file of it, so nobody knows whose its files are. Everything is put in place, unless that
    would replace a file with other bytes: then the whole directory is left alone.

    REPLACE: Another machine has taken a newer snapshot of this node meanwhile. It replaces what is here, but for files
    that the base does not know: those get another name.

    LEAVE: What is here is as new as the newest snapshot, or newer. Only files that are provably broken are replaced,
    and other nodes' files are brought up to date if this node has not changed them.
    """

    FILL = "fill"
    REPLACE = "replace"
    LEAVE = "leave"


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What is taken of one snapshot.

    Attributes:
        wanted: Files and links to put in place.
        here: Files and links of the snapshot that are in their place already, with the same bytes.
        broken: The wanted files that replace a broken one.
        strange: The paths of wanted entries where something lies that no record of Keepstep's names.
        left: Directories that are left alone because they have this run's files.
        conflicts: Directories that are left alone because nobody knows whose their files are, with one such path.
        unknown: First names of paths that lie in no output directory.
        reserved: Paths that lie in Keepstep's own folders.
    """

    wanted: tuple[FileEntry, ...]
    here: tuple[FileEntry, ...]
    broken: frozenset[str]
    strange: frozenset[str]
    left: frozenset[str]
    conflicts: Mapping[str, str]
    unknown: frozenset[str]
    reserved: frozenset[str]

    @property
    def chosen(self) -> tuple[FileEntry, ...]:
        return (*self.wanted, *self.here)

    def without(self, labels: Iterable[str]) -> "Selection":
        """Return the selection without the files of some directories."""
        left_out = frozenset(labels)
        return replace(
            self,
            wanted=tuple(entry for entry in self.wanted if label_of(entry.path) not in left_out),
            here=tuple(entry for entry in self.here if label_of(entry.path) not in left_out),
        )


@dataclass(slots=True)
class TakenPaths:
    """The paths of the snapshots that come first, with the folders that lead to them."""

    paths: set[str] = field(default_factory=set)
    folders: set[str] = field(default_factory=set)

    def add(self, paths: Iterable[str]) -> None:
        for path in paths:
            self.paths.add(path)
            self.folders.update(folders_above(path))

    def leave(self, path: str) -> bool:
        """Return whether there is room for a path: no other has its name, or that of a folder above or below it."""
        return path not in self.paths and path not in self.folders and self.paths.isdisjoint(folders_above(path))


def select_own(output: OutputFiles, base: MirrorBase, checkpoint: CommittedCheckpoint) -> Selection:
    """Select from a snapshot of this node. Blocks. Raises VolumeError if something is in the way of a file."""
    return _Selecting(output, base, snapshot_id(checkpoint)).select(entries_of(checkpoint), is_own=True)


def select_other(
    output: OutputFiles,
    base: MirrorBase,
    own: SnapshotId | None,
    taken: TakenPaths,
    conflicts: Collection[str],
    checkpoint: CommittedCheckpoint,
) -> Selection:
    """Select from another node's snapshot what the snapshots in `taken` do not have. Otherwise as `select_own`.

    Nothing is selected for the directories in `conflicts`.
    """
    entries = [
        entry for entry in entries_of(checkpoint) if label_of(entry.path) not in conflicts and taken.leave(entry.path)
    ]
    return _Selecting(output, base, own).select(entries, is_own=False)


class _Selecting:
    """One selection. `own` is the snapshot of this node that is restored, if there is one."""

    def __init__(self, output: OutputFiles, base: MirrorBase, own: SnapshotId | None) -> None:
        self._output = output
        self._base = base
        known = {label_of(path) for paths in (self._base.files, self._base.others, self._base.links) for path in paths}
        self._treatments = {label: _treatment(label in known, base, own) for label in output.directories}
        self._wanted: list[FileEntry] = []
        self._here: list[FileEntry] = []
        self._broken: set[str] = set()
        self._strange: set[str] = set()
        self._conflicts: dict[str, str] = {}
        self._reserved: set[str] = set()

    def select(self, entries: Iterable[FileEntry], *, is_own: bool) -> Selection:
        known: list[FileEntry] = []
        unknown: set[str] = set()
        for entry in entries:
            label = label_of(entry.path)
            if label in self._treatments and label != entry.path:
                known.append(entry)
            else:
                unknown.add(label)
        looks = self._output.look(entry.path for entry in known)
        for entry in known:
            look, label = looks[entry.path], label_of(entry.path)
            if look.kind is EntryKind.OWN_FOLDER:
                self._reserved.add(entry.path)
                continue
            match self._treatments[label]:
                case Treatment.FILL:
                    self._fill(entry, look)
                case Treatment.REPLACE:
                    self._replace(entry, look, is_own=is_own)
                case Treatment.LEAVE if is_own:
                    self._mend(entry, look)
                case Treatment.LEAVE:
                    self._refresh(entry, look)
        labels = {label_of(entry.path) for entry in known}
        selection = Selection(
            wanted=tuple(self._wanted),
            here=tuple(self._here),
            broken=frozenset(self._broken),
            strange=frozenset(self._strange),
            left=frozenset(label for label in labels if self._treatments[label] is Treatment.LEAVE),
            conflicts=self._conflicts,
            unknown=frozenset(unknown),
            reserved=frozenset(self._reserved),
        )
        return selection.without(self._conflicts)

    def _fill(self, entry: FileEntry, look: Look) -> None:
        label = label_of(entry.path)
        if label in self._conflicts:
            return
        if look.kind is EntryKind.NOTHING:
            self._wanted.append(entry)
        elif self._output.holds(entry, look):
            self._here.append(entry)
        else:
            self._conflicts[label] = entry.path

    def _replace(self, entry: FileEntry, look: Look, *, is_own: bool) -> None:
        if look.kind in (EntryKind.FOLDER, EntryKind.BLOCKED):
            there = "a folder is there" if look.kind is EntryKind.FOLDER else "one of its folders is something else"
            raise in_the_way(self._output.place(entry.path), there)
        if self._is_strange(entry, look):
            if self._output.holds(entry, look):
                self._here.append(entry)
            else:
                self._strange.add(entry.path)
                self._wanted.append(entry)
            return
        if not is_own:
            if look.seen is None or look.seen != self._brought(entry):
                self._wanted.append(entry)
            return
        held = self._base.files.get(entry.path)
        if held is not None and held.fingerprint == look.seen and held.entry.has_bytes_of(entry):
            self._here.append(entry)
        else:
            self._wanted.append(entry)

    def _is_strange(self, entry: FileEntry, look: Look) -> bool:
        """Whether something lies in an entry's place that restore has not put there and no snapshot of ours has."""
        names = (self._base.files, self._base.others, self._base.links)
        return look.kind is not EntryKind.NOTHING and not any(entry.path in paths for paths in names)

    def _mend(self, entry: FileEntry, look: Look) -> None:
        held = self._base.files.get(entry.path)
        if entry.link or look.kind is not EntryKind.FILE or (held is not None and held.fingerprint == look.seen):
            return
        if self._output.is_broken(entry.path):
            self._broken.add(entry.path)
            if self._is_strange(entry, look):
                self._strange.add(entry.path)
            self._wanted.append(entry)

    def _brought(self, entry: FileEntry) -> Fingerprint | None:
        """Return what this very version of another node's file looked like when it was put in place here."""
        brought = self._base.others.get(entry.path)
        if brought is None or (brought.size_bytes, brought.mtime_ns) != (entry.size_bytes, entry.modified_ns):
            return None
        return brought

    def _refresh(self, entry: FileEntry, look: Look) -> None:
        brought = self._base.others.get(entry.path)
        if entry.link or (look.kind is EntryKind.NOTHING and brought is not None):
            return
        is_older = brought is not None and look.seen == brought and brought.mtime_ns < (entry.modified_ns or 0)
        if look.kind is EntryKind.NOTHING or is_older:
            self._wanted.append(entry)


def next_base(
    base: MirrorBase,
    own: CommittedCheckpoint | None,
    own_selection: Selection | None,
    looks: Mapping[str, Fingerprint],
    others: Iterable[str],
) -> MirrorBase:
    """Return the base of the next snapshot, after files were put in place that look as `looks` says.

    The base's snapshot must name all its files: their objects are kept for its sake. So what comes from another
    snapshot than that is not added, and is sent again.
    """
    brought = {path: looks[path] for path in others if path in looks}
    if own is not None and own_selection is not None:
        chosen = own_selection.chosen
        held = _held(own, {entry.path: looks[entry.path] for entry in chosen if entry.path in looks})
        links = {entry.path: entry.link for entry in chosen if entry.link}
        if is_newer(snapshot_id(own), base):
            base = MirrorBase(snapshot=snapshot_id(own), files=held, others=base.others, links=links)
        elif base.snapshot == snapshot_id(own):
            files = HeldFiles({**base.files, **held}.values())
            base = replace(base, files=files, links={**base.links, **links})
    return replace(
        base, others={path: seen for path, seen in {**base.others, **brought}.items() if path not in base.files}
    )


def is_newer(own: SnapshotId, base: MirrorBase) -> bool:
    """Whether another machine has taken the snapshot `own` of this node, after the last one of this volume.

    A snapshot of this volume that was committed just before its agent died looks the same, but for `pending`.
    """
    last = base.snapshot
    if own.save in base.pending:
        return False
    return last is None or last.series != own.series or last.number < own.number


def snapshot_id(checkpoint: CommittedCheckpoint) -> SnapshotId:
    info = checkpoint.marker.info
    return SnapshotId(series=info.name, number=info.step, save=info.save)


def label_of(path: str) -> str:
    """Return the name of the output directory that a snapshot's path begins with."""
    return path.partition("/")[0]


def _treatment(is_known: bool, base: MirrorBase, own: SnapshotId | None) -> Treatment:
    if own is not None and own.save in base.pending:
        return Treatment.LEAVE
    if not is_known:
        return Treatment.FILL
    return Treatment.REPLACE if own is not None and is_newer(own, base) else Treatment.LEAVE


def entries_of(checkpoint: CommittedCheckpoint) -> Iterator[FileEntry]:
    yield from (file.entry for file in checkpoint.files)
    yield from checkpoint.links


def _held(checkpoint: CommittedCheckpoint, looks: Mapping[str, Fingerprint]) -> HeldFiles:
    return HeldFiles(held for manifest in checkpoint.manifests for held in held_files(manifest, looks))

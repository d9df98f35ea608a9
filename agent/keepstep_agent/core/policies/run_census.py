"""Finds the runs below a prefix in one flat listing, and files every object with the run and the save that it is of.

Knows keys, sizes and times alone. Invariants: every object is counted once; a folder that only looks like a run,
because it lies in a save of another, is none; memory grows with the folders and the commit markers, not with the
objects.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate

from keepstep_agent.core.policies.restore_choice import CommittedSave, last_line
from keepstep_agent.core.stored.object_layout import UPLOADS_PREFIX, run_of_record, save_of_record
from keepstep_api.names import STATE_DIRECTORY


@dataclass(slots=True, kw_only=True)
class Folder:
    """The objects of one folder, or of one save. `modified_at` is that of the youngest."""

    size_bytes: int = 0
    objects: int = 0
    modified_at: float = 0.0

    def add(self, size_bytes: int, modified_at: float, objects: int = 1) -> None:
        self.size_bytes += size_bytes
        self.objects += objects
        self.modified_at = max(self.modified_at, modified_at)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnfinishedUpload:
    """An upload in parts. `size_bytes` is 0 if the store does not say it."""

    key: str
    started_at: float
    size_bytes: int


@dataclass(slots=True, kw_only=True)
class StoredRun:
    """What a run has. `prefix` is empty or ends with a slash.

    `committed` also has the saves of which only the weights are left. `saves` are by name and save id; those in
    `proven` have a manifest, a pack or a reservation. `aside`: what a directory as the destination keeps of unfinished
    uploads.
    """

    prefix: str
    committed: list[CommittedSave] = field(default_factory=list)
    saves: dict[tuple[str, str], Folder] = field(default_factory=lambda: defaultdict(Folder))
    proven: set[tuple[str, str]] = field(default_factory=set)
    records: Folder = field(default_factory=Folder)
    foreign: Folder = field(default_factory=Folder)
    aside: list[Folder] = field(default_factory=list)
    uploads: list[UnfinishedUpload] = field(default_factory=list)

    @property
    def newest(self) -> list[CommittedSave]:
        """The announced checkpoints of the highest step: several if attempts have saved it.

        Of several output directories, those of the one that was committed to last.
        """
        announced = last_line(one for one in self.committed if not one.series and not one.weights_only)
        step = max((one.step for one in announced), default=0)
        return [one for one in announced if one.step == step]


class Census:
    """Takes a listing in any order, folder by folder, and finds the runs in it."""

    def __init__(self) -> None:
        self._folders: defaultdict[str, Folder] = defaultdict(Folder)
        self._committed: defaultdict[str, list[CommittedSave]] = defaultdict(list)
        self._runs: set[str] = set()
        self._saves: set[str] = set()

    def add(self, key: str, size_bytes: int, modified_at: float) -> None:
        """Count an object. `key` is relative to the prefix."""
        self._folders[key[: key.rfind("/") + 1]].add(size_bytes, modified_at)
        if save := save_of_record(key):
            self._saves.add(save)
        elif (run := run_of_record(key)) is not None:
            self._runs.add(run)

    def add_marker(self, run: str, committed: CommittedSave) -> None:
        """Note what a marker's key says; its object is added too. `committed.key` is relative to the run."""
        self._committed[run].append(committed)

    def runs(self, uploads: Iterable[UnfinishedUpload]) -> tuple[tuple[StoredRun, ...], StoredRun]:
        """Return the runs by prefix, and what lies in none of them."""
        found = self._recognised()
        outside = StoredRun(prefix="")
        for path, folder in self._folders.items():
            run = _nearest(path, found)
            if run:
                _file(run, path.removeprefix(run.prefix), folder)
            else:
                outside.foreign.add(folder.size_bytes, folder.modified_at, folder.objects)
        for upload in uploads:
            (_nearest(upload.key, found) or outside).uploads.append(upload)
        return tuple(found[prefix] for prefix in sorted(found)), outside

    def _recognised(self) -> dict[str, StoredRun]:
        """Return the runs by prefix. The outer ones are judged first: what looks like a run in their saves is none."""
        runs: dict[str, StoredRun] = {}
        ids: dict[str, set[str]] = {}
        saves_of: defaultdict[str, set[tuple[str, str]]] = defaultdict(set)
        for path in self._saves:
            run, name, save = _split_save(path)
            saves_of[run].add((name, save))
        for prefix in sorted(self._runs | saves_of.keys(), key=lambda prefix: prefix.count("/")):
            if any(_lies_in_save(prefix, run, ids[run]) for run in _ancestors(prefix) if run in runs):
                continue
            committed = self._committed.get(prefix, [])
            runs[prefix] = StoredRun(prefix=prefix, committed=committed, proven=saves_of[prefix])
            ids[prefix] = {one.save for one in committed} | {save for _, save in saves_of[prefix]}
        return runs


def _ancestors(path: str) -> list[str]:
    """Return the folders above a path, the outermost first, which is the empty one."""
    return ["", *accumulate(f"{name}/" for name in path.split("/")[:-1])]


def _nearest(path: str, runs: Mapping[str, StoredRun]) -> StoredRun | None:
    """Return the innermost run that a folder or a key lies in."""
    return next((runs[prefix] for prefix in reversed(_ancestors(path)) if prefix in runs), None)


def _split_save(path: str) -> tuple[str, str, str]:
    *above, name, save, _ = path.split("/")
    return "".join(f"{one}/" for one in above), name, save


def _lies_in_save(prefix: str, run: str, saves: Collection[str]) -> bool:
    parts = prefix.removeprefix(run).split("/")
    return prefix != run and len(parts) > 2 and parts[1] in saves


def _file(run: StoredRun, path: str, folder: Folder) -> None:
    """Add a folder, whose path is relative to the run, to what it belongs to."""
    parts = path.split("/")
    if path.startswith(UPLOADS_PREFIX):
        run.aside.append(folder)
        return
    if parts[0] == STATE_DIRECTORY:
        place = run.records
    elif len(parts) > 2:
        place = run.saves[parts[0], parts[1]]
    else:
        place = run.foreign
    place.add(folder.size_bytes, folder.modified_at, folder.objects)

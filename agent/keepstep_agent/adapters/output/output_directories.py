"""Opens and lists the output directories: the directories that a program writes to, and that snapshots are taken of.

A path in a snapshot begins with the last name of its directory. A directory below the volume is opened from the volume,
name by name and never through a link, because the trainer may have put one there. Others are the operator's own, as
under `keepstep run`.
"""

import os
import stat
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from keepstep_agent.adapters.volume.shared_volume import Folder, fingerprint, open_volume, path_in
from keepstep_agent.core.limits import FILES_PER_RANK
from keepstep_agent.core.mirror.output_scan import OutputScan
from keepstep_agent.core.model import Fingerprint
from keepstep_api.names import STATE_DIRECTORY, TEMPORARY_PREFIXES

PARTIAL: Final = f"{STATE_DIRECTORY}-partial"
"""What has this name in an output directory gets another one in a moment; after a crash of restore it is garbage."""
_PROBE: Final = "time-of-reads"
_BLOCK_BYTES: Final = 512
_LEAST_HOLE_BYTES: Final = 4_096
_SECOND_NAME: Final = "as a file of its own, though it has another name here"
_EMPTY: Final = "not at all, as it is an empty folder"


class OutputDirectories:
    """The output directories of one volume. Methods block."""

    def __init__(self, volume: Path, directories: Sequence[str]) -> None:
        self._volume = volume
        self._directories = {Path(directory).name: Path(directory) for directory in directories}

    @property
    def directories(self) -> Mapping[str, Path]:
        """The directories by their last name."""
        return self._directories

    def folder(self, path: str) -> Folder:
        """Open a folder by its path in a snapshot. Raises OSError; KeyError if no directory has its first name."""
        root, below = self.root_of(path)
        with open_volume(root) as opened:
            return opened.folder(below)

    def root_of(self, path: str) -> tuple[Path, str]:
        """Return what to open by its path for a path of a snapshot, and where it is from there. Raises KeyError."""
        label, _, below = path.partition("/")
        directory = self._directories[label]
        if directory.is_relative_to(self._volume):
            return self._volume, f"{path_in(self._volume, directory)}/{below}".strip("/")
        return directory, below

    def scan(
        self, left_out: Collection[str], before: Mapping[str, Fingerprint], unannounced: frozenset[str] = frozenset()
    ) -> OutputScan:
        """Look at everything but `left_out` and `unannounced`, which are paths of files and folders.

        Missing directories are empty. `before` are the fingerprints of an earlier look: equal ones are used again, and
        the texts of paths, which saves memory.
        """
        left_out = {*left_out, *unannounced}
        paths = dict(zip(before, before, strict=True))
        found = _Found()
        missing: set[str] = set()
        for label in self._directories:
            if label in left_out:
                continue
            try:
                with self.folder(label) as top:
                    _scan(top, f"{label}/", left_out, before, paths, found)
            except FileNotFoundError:
                missing.add(label)
            except OSError as error:
                found.problems[label] = f"it cannot be read: {error.strerror}"
        return OutputScan(
            files=before if before == found.files else found.files,
            settled=frozenset(found.settled),
            links={path: self._relative(path, target) for path, target in found.links.items()},
            problems=found.problems,
            missing=frozenset(missing),
            unannounced=unannounced,
            comes_back_changed=found.changed,
        )

    def _relative(self, path: str, target: str) -> str:
        """Make a link's absolute target relative if it lies in the same directory: it may come back somewhere else."""
        if not target.startswith("/"):
            return target
        label, _, below = path.partition("/")
        place = os.path.normpath(target)
        for directory in (os.path.normpath(self._directories[label]), os.path.realpath(self._directories[label])):
            if place.startswith(f"{directory}/"):
                return os.path.relpath(place, Path(directory, below).parent)
        return target

    def unread(self, restored: Mapping[str, Fingerprint]) -> bool | None:
        """Whether all these files are as restore brought them, and none was read since; False if one was read.

        Restore gave each one time for reads and writes; so does a program that replaces it with a new file. None where
        nobody knows: the filesystem does not keep the time of reads, or is another one than the volume's, or a file has
        been deleted or changed, perhaps after it was read.
        """
        if not restored or not self._keeps_times_of_reads():
            return None
        with open_volume(self._volume) as root:
            device = os.fstat(root.descriptor).st_dev
        is_as_brought = True
        for path, brought in restored.items():
            above, _, name = path.rpartition("/")
            try:
                with self.folder(above) as folder:
                    status = folder.status(name)
            except OSError:
                is_as_brought = False
                continue
            if status.st_dev != device or fingerprint(status) != brought:
                is_as_brought = False
            elif status.st_atime_ns != status.st_mtime_ns:
                return False
        return True if is_as_brought else None

    def _keeps_times_of_reads(self) -> bool:
        try:
            with open_volume(self._volume) as root, root.folder(STATE_DIRECTORY) as folder:
                folder.write_durably(_PROBE, b"read me")
                os.utime(_PROBE, ns=(1, 1), dir_fd=folder.descriptor)
                folder.read(_PROBE, len(b"read me"))
                found = folder.status(_PROBE).st_atime_ns
                folder.unlink(_PROBE)
        except OSError:
            return False
        return found != 1


@dataclass(slots=True)
class _Found:
    """What a scan has found so far, as in `OutputScan`."""

    files: dict[str, Fingerprint] = field(default_factory=dict)
    settled: set[str] = field(default_factory=set)
    links: dict[str, str] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    changed: dict[str, str] = field(default_factory=dict)


def _loss(status: os.stat_result) -> str:
    """Return how a file comes back, if not as it is; else ""."""
    mode = status.st_mode
    if mode & stat.S_IXUSR or not mode & stat.S_IRGRP:
        return "without its mode"
    if status.st_blocks * _BLOCK_BYTES + _LEAST_HOLE_BYTES <= status.st_size:
        return "without its holes, if it has any"
    return ""


def _is_keepsteps_own(path: str) -> bool:
    """Whether a folder is Keepstep's own, or below one: its state, or what a Checkpointer has not finished."""
    return any(name == STATE_DIRECTORY or name.startswith(TEMPORARY_PREFIXES) for name in path.split("/"))


def _scan(
    folder: Folder,
    prefix: str,
    left_out: Collection[str],
    before: Mapping[str, Fingerprint],
    paths: Mapping[str, str],
    found: _Found,
) -> None:
    skipped = tuple(f"{path}/" for path in left_out)
    # Files that have several names. One of them may be a pin of ours.
    linked: set[int] = set()

    def unreadable(where: str, error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            found.problems[f"{prefix}{where}".rstrip("/")] = f"it cannot be read: {error.strerror}"

    for below, opened, entries in folder.walk(unreadable):
        here = prefix + below
        if _is_keepsteps_own(below) or (skipped and here.startswith(skipped)):
            continue
        if below and not entries:
            found.changed.setdefault(_EMPTY, here.rstrip("/"))
        for entry in entries:
            path = here + entry.name
            if path in left_out or entry.name == PARTIAL or entry.is_dir(follow_symlinks=False):
                continue
            try:
                status = opened.status_of(entry)
                if stat.S_ISLNK(status.st_mode):
                    found.links[path] = opened.read_link(entry.name)
                    continue
            except OSError:
                # It has just been removed.
                continue
            if not stat.S_ISREG(status.st_mode):
                continue
            if len(found.files) == FILES_PER_RANK:
                found.problems[prefix.rstrip("/")] = (
                    f"it has more than {FILES_PER_RANK:,} files: the others are not stored"
                )
                return
            path = paths.get(path, path)
            known = before.get(path)
            if known is None or (known.size_bytes, known.mtime_ns, known.inode) != (
                status.st_size,
                status.st_mtime_ns,
                status.st_ino,
            ):
                if (known is None or known.inode != status.st_ino) and status.st_ctime_ns > status.st_mtime_ns:
                    found.settled.add(path)
                known = fingerprint(status)
                if loss := _loss(status):
                    found.changed.setdefault(loss, path)
            found.files[path] = known
            if status.st_nlink > 1:
                if known.inode in linked:
                    found.changed.setdefault(_SECOND_NAME, path)
                linked.add(known.inode)

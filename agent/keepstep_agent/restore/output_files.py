"""Puts the files of snapshots into the output directories, and tells what is there already.

A path of a snapshot begins with the last name of its output directory. Invariants: nothing is written outside the
output directories, into Keepstep's own folders, or through a link; a file appears under its name complete, with the
time that it had, and later than every older file, because programs look for the newest; what `put` has returned from is
on disk. All methods block. They raise VolumeError only.
"""

import errno
import os
import stat
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from pathlib import Path
from typing import Final

from keepstep_agent.adapters.checksum import region_checksum
from keepstep_agent.adapters.durable_files import make_folder, sync_folder
from keepstep_agent.adapters.output.file_formats import prove
from keepstep_agent.adapters.output.output_directories import OutputDirectories
from keepstep_agent.adapters.region_file import part_region
from keepstep_agent.adapters.volume.errors import volume_error
from keepstep_agent.adapters.volume.shared_folders import (
    make_own_folder,
    make_state_directory,
    open_state_directory,
    share_tree,
)
from keepstep_agent.adapters.volume.shared_volume import Folder, fingerprint, open_volume
from keepstep_agent.core.errors import ErrorKind, VolumeError
from keepstep_agent.core.mirror.base import MirrorBase
from keepstep_agent.core.mirror.file_states import Proof
from keepstep_agent.core.mirror.output_scan import folder_of, folders_above, is_log
from keepstep_agent.core.model import FileEntry, Fingerprint
from keepstep_agent.restore.placing import place_file, place_link, set_read_time, set_time
from keepstep_agent.restore.strange_files import move_aside, remove_recorded
from keepstep_api.names import INCOMING_DIRECTORY, STATE_DIRECTORY

_INCOMING: Final = f"{STATE_DIRECTORY}/{INCOMING_DIRECTORY}"


class EntryKind(StrEnum):
    """What is at a path. `BLOCKED`: a file, a link or a mount where a folder would have to be."""

    NOTHING = "nothing"
    FILE = "file"
    LINK = "link"
    FOLDER = "folder"
    SPECIAL = "special"
    BLOCKED = "blocked"
    OWN_FOLDER = "own-folder"


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What is at a path: what a file looks like, or where a link leads."""

    kind: EntryKind
    seen: Fingerprint | None = None
    link: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A file or a link to put in place. `source`: the folder below the volume that it was downloaded to.

    Without a source the file is in its place already, and only gets its time. `keeps_old`: what has its name is kept,
    under another one.
    """

    entry: FileEntry
    source: str = ""
    keeps_old: bool = False


class OutputFiles:
    """The output directories of one volume, as restore fills them."""

    def __init__(self, volume: Path, directories: Sequence[str], state_directory: Path) -> None:
        self._volume = volume
        self._state_directory = state_directory
        self._output = OutputDirectories(volume, directories)
        self._own: frozenset[tuple[int, int]] = frozenset()

    @property
    def directories(self) -> Mapping[str, Path]:
        """The output directories by their last name."""
        return self._output.directories

    def place(self, path: str) -> Path:
        """Return where a path of a snapshot is, as the program sees it."""
        label, _, below = path.partition("/")
        return self._output.directories[label] / below

    def prepare(self) -> None:
        """Make Keepstep's own folders, and remember them: an output directory may contain them."""
        make_state_directory(self._volume, self._state_directory)
        try:
            with (
                open_volume(self._volume) as root,
                make_own_folder(root) as own,
                open_state_directory(self._volume, self._state_directory) as state,
            ):
                self._own = frozenset({_identity(own), _identity(state)})
        except OSError as error:
            raise volume_error(error, f"preparing {self._volume}/{STATE_DIRECTORY}") from error

    def incoming(self, series: str, save: str) -> str:
        """Return where a snapshot is downloaded to, relative to the volume."""
        return f"{_INCOMING}/{series}/{save}"

    def discard(self, series: str) -> None:
        """Remove what was downloaded of a series, if anything."""
        try:
            with open_volume(self._volume) as root:
                root.remove(f"{_INCOMING}/{series}")
        except OSError as error:
            raise volume_error(error, f"removing {_INCOMING}/{series}") from error

    def look(self, paths: Iterable[str]) -> dict[str, Look]:
        """Return what is at each path. All begin with the name of an output directory."""
        looks: dict[str, Look] = {}
        for above, together in groupby(sorted(paths), key=folder_of):
            same_folder = list(together)
            try:
                with self._folder(above) as folder:
                    looks.update((path, _look(folder, _name_of(path))) for path in same_folder)
            except OSError as error:
                looks.update(dict.fromkeys(same_folder, Look(kind=_kind_of(error, f"looking at {self.place(above)}"))))
        return looks

    def holds(self, entry: FileEntry, look: Look) -> bool:
        """Return whether the very bytes of a file, or a link with the same target, are in place. Reads the file."""
        if entry.link or look.kind is not EntryKind.FILE or look.seen is None:
            return look.kind is EntryKind.LINK and look.link == entry.link
        if look.seen.size_bytes != entry.size_bytes:
            return False
        root, below = self._output.root_of(entry.path)
        try:
            return all(
                region_checksum(part_region(root, below, part, look.seen)) == checksum
                for part, checksum in zip(entry.parts(), entry.checksums, strict=True)
            )
        except VolumeError:
            return False

    def is_broken(self, path: str) -> bool:
        """Return whether a file's own format shows that it is not complete."""
        name = _name_of(path)
        try:
            with self._folder(folder_of(path)) as folder, os.fdopen(folder.open_file(name), "rb") as file:
                return prove(file, name, os.fstat(file.fileno()).st_size) is Proof.BROKEN
        except OSError:
            return False

    def mark_unread(self, paths: Iterable[str]) -> None:
        """Set the time of the last read of files to that of the last write, so that a later read shows.

        That counts as a change of each file, so the files are taken in the order in which they were changed last:
        programs look for the newest.
        """
        found: list[tuple[int, str]] = []
        is_read = False
        for path in paths:
            with suppress(OSError), self._folder(folder_of(path)) as folder:
                status = folder.status(_name_of(path))
                found.append((status.st_ctime_ns, path))
                is_read |= status.st_atime_ns != status.st_mtime_ns
        for _, path in sorted(found) if is_read else ():
            with suppress(OSError), self._folder(folder_of(path)) as folder:
                set_read_time(folder, _name_of(path))

    def strays(self, base: MirrorBase, left_out: Collection[str]) -> list[Path]:
        """Return what lies in the directories of a base's snapshot, and is neither its nor a log."""
        scan = self._output.scan(left_out, {})
        known = {**base.files.looks(), **base.others}
        labels = {path.partition("/")[0] for path in (*base.files, *base.links)}
        files = [path for path, seen in scan.files.items() if known.get(path) != seen and not is_log(path)]
        links = [path for path, target in scan.links.items() if base.links.get(path) != target]
        return [self.place(path) for path in (*files, *links) if path.partition("/")[0] in labels]

    def clear(self, base: MirrorBase, kept: Collection[str]) -> None:
        """Remove what a base's snapshot has and `kept` does not; give a log that is longer by now another name."""
        looks = self.look([*base.files, *base.links])
        removed: dict[str, list[str]] = {}
        try:
            for path, look in looks.items():
                held = base.files.get(path)
                is_stored = look.link == base.links[path] if held is None else look.seen == held.fingerprint
                if path not in kept and (is_stored or look.kind is EntryKind.NOTHING):
                    label, _, below = path.partition("/")
                    name, _, rest = below.partition("/")
                    removed.setdefault(f"{label}/{name}", []).append(rest)
                elif path in kept and not is_stored and look.kind is EntryKind.FILE:
                    with self._folder(folder_of(path)) as folder:
                        move_aside(folder, _name_of(path))
            for top, paths in removed.items():
                with self._folder(folder_of(top)) as folder:
                    remove_recorded(folder, _name_of(top), paths)
        except OSError as error:
            raise volume_error(error, "making room for an older snapshot") from error

    def put(self, files: Sequence[Placed]) -> dict[str, Fingerprint]:
        """Put files in place, the oldest first, then links. Return what the files look like now."""
        looks: dict[str, Fingerprint] = {}
        in_order = sorted(files, key=lambda one: (bool(one.entry.link), one.entry.modified_ns or 0, one.entry.path))
        for one in in_order:
            path = one.entry.path
            try:
                with self._folder(folder_of(path), make=True) as target:
                    self._put_one(one, target)
                    if not one.entry.link:
                        looks[path] = fingerprint(target.status(_name_of(path)))
            except OSError as error:
                raise _not_placed(error, self.place(path)) from error
        self._sync({folder_of(one.entry.path) for one in files if one.source or one.entry.link})
        return looks

    def _put_one(self, one: Placed, target: Folder) -> None:
        entry, name = one.entry, _name_of(one.entry.path)
        if one.keeps_old and target.exists(name):
            move_aside(target, name)
        if entry.link:
            place_link(entry, name, target)
        elif not one.source:
            # It may belong to another user.
            with suppress(PermissionError):
                set_time(target, name, entry)
        else:
            with open_volume(self._volume) as root, root.folder(f"{one.source}/{folder_of(entry.path)}") as incoming:
                place_file(incoming, entry, name, target)

    def _folder(self, path: str, *, make: bool = False) -> Folder:
        """Open a folder by its path in a snapshot. Raises OSError."""
        root, below = self._output.root_of(path)
        if root.is_symlink() and not root.exists():
            # Nothing is missing that restore could make.
            raise NotADirectoryError(errno.ENOTDIR, "a link to nothing", str(root))
        if make:
            # Only under `keepstep run` it may be missing.
            make_folder(root)
        with open_volume(root) as opened:
            found = opened.folder("")
            for name in below.split("/") if below else ():
                with found:
                    found = self._enter(found, name, opened, make=make)
        return found

    def _enter(self, folder: Folder, name: str, root: Folder, *, make: bool) -> Folder:
        is_new = make and not folder.exists(name)
        found = folder.make_folder(name) if make else folder.folder(name)
        if _identity(found) in self._own:
            found.close()
            raise _OwnFolderError(errno.EACCES, "Keepstep's own folder", name)
        if is_new:
            share_tree(found, root)
        return found

    def _sync(self, paths: Iterable[str]) -> None:
        """Make the names in these folders and in all above them durable."""
        above = {folder for path in paths for folder in (path, *folders_above(path))}
        try:
            for path in sorted(above):
                with self._folder(path) as folder:
                    folder.sync()
            for root, below in {self._output.root_of(path.partition("/")[0]) for path in above}:
                with open_volume(root) as opened:
                    opened.sync()
                    for place in (below, *folders_above(below)):
                        with opened.folder(place) as folder:
                            folder.sync()
                if root != self._volume:
                    for parent in root.parents:
                        with suppress(PermissionError):
                            sync_folder(parent)
        except OSError as error:
            raise volume_error(error, "writing the output directories") from error


class _OwnFolderError(OSError):
    """The folder is Keepstep's own."""


def _look(folder: Folder, name: str) -> Look:
    try:
        status = folder.status(name)
    except FileNotFoundError:
        return Look(kind=EntryKind.NOTHING)
    if stat.S_ISREG(status.st_mode):
        return Look(kind=EntryKind.FILE, seen=fingerprint(status))
    if stat.S_ISLNK(status.st_mode):
        return Look(kind=EntryKind.LINK, link=folder.read_link(name))
    return Look(kind=EntryKind.FOLDER if stat.S_ISDIR(status.st_mode) else EntryKind.SPECIAL)


def _kind_of(error: OSError, what: str) -> EntryKind:
    """Return what is at a path whose folder cannot be opened."""
    if isinstance(error, FileNotFoundError):
        return EntryKind.NOTHING
    if isinstance(error, _OwnFolderError):
        return EntryKind.OWN_FOLDER
    if error.errno in {errno.ENOTDIR, errno.ELOOP, errno.EXDEV}:
        return EntryKind.BLOCKED
    raise volume_error(error, what) from error


def _not_placed(error: OSError, place: Path) -> VolumeError:
    if error.errno in {errno.ENOTDIR, errno.ELOOP, errno.EXDEV, errno.EISDIR} or isinstance(error, _OwnFolderError):
        return in_the_way(place, f"{error.strerror}")
    return volume_error(error, f"putting {place} in its place")


def in_the_way(place: Path, what: str) -> VolumeError:
    """The error for a place that a file of a snapshot cannot have."""
    return VolumeError(
        ErrorKind.VOLUME_UNUSABLE,
        f"{place} cannot be restored: {what}",
        hint="move away what has its name, or the name of one of its folders",
    )


def _identity(folder: Folder) -> tuple[int, int]:
    status = os.fstat(folder.descriptor)
    return status.st_dev, status.st_ino


def _name_of(path: str) -> str:
    return path.rpartition("/")[2]

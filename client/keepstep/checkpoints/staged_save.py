"""The files of one save, from the folder in which they are written to their places.

Owns the folder `.saving-<save>` and all that is in it. Invariants: a program's file is only replaced by one of its own
name, as its framework would replace it. A save whose note is written gets its places even if the process is killed: the
next start moves the rest. Until the note is written, its places are untouched.

.saving-<save>/<name>       the checkpoint, a folder or a file, as its framework or program writes it
.saving-<save>/<other>      what the framework wrote beside it, such as a file that names its newest checkpoint
.saving-<save>/.complete    the note: all of it is on disk. It says where it belongs, and has its record
"""

import errno
import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from keepstep import operating_system
from keepstep.checkpoints.durable import sync_directory, sync_tree, write_durably
from keepstep.checkpoints.records import (
    Record,
    RecordedFile,
    decode_record,
    read_record,
    remove_record,
    write_record,
)
from keepstep_api import names
from keepstep_api.records import record_file

_log: Final = logging.getLogger("keepstep")
_NOTE: Final = ".complete"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Note:
    """`directory` and `by_framework` as in a record. `inode`: of the checkpoint as it was written: by it one finds that
    it has its place.

    `replaced`: files of an earlier save of ours at this place, which this one does not have and which go.
    """

    path: Path
    directory: str
    by_framework: bool
    inode: int
    record: Record | None
    replaced: frozenset[str]

    def encode(self, beside: Path) -> bytes:
        """Return the content of the note in the folder `beside`: the volume may be mounted elsewhere next time."""
        record = None if self.record is None else json.loads(self.record.encode())
        note = {
            "path": os.path.relpath(_real(self.path), _real(beside)),
            "directory": self.directory,
            "by_framework": self.by_framework,
            "inode": self.inode,
            "record": record,
            "replaced": sorted(self.replaced),
        }
        return json.dumps(note).encode()


class StagedSave:
    """One save below `parent`. The ranks of a pod share its folder, and one of them calls what comes after `make`.

    `directory` and `by_framework` as in the record.
    """

    def __init__(self, parent: Path, save: str, path: Path, *, directory: str, by_framework: bool) -> None:
        self.folder: Final = parent / f"{names.SAVING_PREFIX}{save}"
        self.path: Final = path
        """Where the checkpoint belongs."""
        self.written: Final = self.folder / path.name
        """Where it is written."""
        self._directory = directory
        self._by_framework = by_framework

    def make(self) -> None:
        """Make the folder, and a Checkpointer's in it; ranks may do so at once. Raises OSError."""
        (self.folder if self._by_framework else self.written).mkdir(parents=True, exist_ok=True)

    def sync(self) -> tuple[RecordedFile, ...]:
        """Make all that was written durable, and return the checkpoint's files, if there are any. Raises OSError."""
        files = tuple(RecordedFile(path=path, size_bytes=size_bytes) for path, size_bytes in sync_tree(self.written))
        for beside in _entries(self.folder):
            if beside != self.written:
                list(sync_tree(beside))
        sync_directory(self.folder)
        return files

    def put_in_place(self, record: Record | None, records: Path) -> Record | None:
        """Move it to its place, and record it there unless `record` is None. Call `sync` first.

        Returns the record that it wrote; None if there is none, or it cannot be written. Raises OSError if it cannot be
        moved. In both cases the next start tries again.
        """
        discard_older(self.folder.parent, self.path, but=self.folder)
        replaced: set[str] = set()
        before = self._record_before(records)
        is_ours = before is not None and not (before.committed or before.by_framework or self._by_framework)
        if before is not None and is_ours and self.written.is_dir():
            # A framework leaves what it wrote under this name before, and a Checkpointer does not.
            replaced = {file.path for file in before.files} - files_below(self.written)
        note = _Note(
            path=self.path,
            directory=self._directory,
            by_framework=self._by_framework,
            inode=_inode(self.written),
            record=record,
            replaced=frozenset(replaced),
        )
        write_durably(self.folder / _NOTE, note.encode(self.folder))
        return self._finish(note, records)

    def finish(self, records: Path) -> None:
        """Go on after the process was killed, where `saves_to_finish` has this save. Raises OSError."""
        note = _read_note(self.folder)
        if self._is_outdated(note, records):
            _log.warning("a complete save is given up, a newer one is there: path=%s", self.path)
            self.discard()
        else:
            self._finish(note, records)

    def discard(self) -> None:
        """Delete the save, as far as it has no place. What cannot be deleted is deleted by the next start."""
        # First what makes it a complete one.
        with suppress(OSError):
            (self.folder / _NOTE).unlink()
        delete(self.folder)

    def _finish(self, note: _Note, records: Path) -> Record | None:
        if self._record_before(records) is not None:
            # While files of two saves have these names, nothing may take them for the recorded checkpoint.
            remove_record(records / self._record_file)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        place = _place(self.written, self.path)
        if note.inode and _inode(place) == note.inode:
            # It has its place. After an exchange, what lies here is what lay there.
            _return_others(self.written, place, note.replaced)
        elif self.written.exists():
            _put(self.written, place, note.replaced)
        for beside in list(_entries(self.folder)):
            if beside != self.written:
                _put(beside, _place(beside, self.path.with_name(beside.name)), frozenset())
        # A folder that was there has kept its own inode.
        record = None if note.record is None else replace(note.record, inode=_inode(place))
        try:
            if record is not None:
                write_record(records, record)
        except OSError as error:
            _log.warning("checkpoint not recorded: path=%s error=%s", self.path, error)
            return None
        self.discard()
        return record

    @property
    def _record_file(self) -> str:
        return record_file(self._directory, self.path.name)

    def _record_before(self, records: Path) -> Record | None:
        """Return the record of what has this place."""
        return read_record(records / self._record_file)

    def _is_outdated(self, note: _Note, records: Path) -> bool:
        """Whether something newer was saved at this place, after this save could not get it."""
        before = self._record_before(records)
        if before is not None and note.record is not None:
            return before.order > note.record.order
        noted_ns = (self.folder / _NOTE).stat().st_mtime_ns
        files = [file.path for file in note.record.files] if note.record is not None else [""]
        return any(_changed_ns(self.path / file) > noted_ns for file in files)


def saves_to_finish(parent: Path) -> Iterator[StagedSave]:
    """Yield the saves below `parent` that are complete and have not yet got their places.

    Raises OSError. One whose note cannot be read is left alone, and said.
    """
    for folder in sorted(parent.glob(f"{names.SAVING_PREFIX}*")):
        if has_note(folder):
            try:
                note = _read_note(folder)
            except (OSError, ValueError, KeyError, TypeError) as error:
                _log.warning("a complete save is left alone: folder=%s error=%r", folder, error)
            else:
                save = folder.name.removeprefix(names.SAVING_PREFIX)
                yield StagedSave(parent, save, note.path, directory=note.directory, by_framework=note.by_framework)


def discard_older(parent: Path, path: Path, *, but: Path | None = None) -> None:
    """Give up saves that could not get the place `path`, where a newer one is saved now. Raises OSError."""
    for save in saves_to_finish(parent):
        if save.folder != but and _real(save.path) == _real(path):
            save.discard()


def has_note(folder: Path) -> bool:
    """Whether a save is complete, or may be."""
    return os.path.lexists(folder / _NOTE)


def _read_note(folder: Path) -> _Note:
    """Raises OSError, ValueError, KeyError or TypeError."""
    try:
        value: dict[str, Any] = json.loads((folder / _NOTE).read_bytes())
    except RecursionError as error:
        raise ValueError(str(error)) from error
    return _Note(
        path=Path(os.path.normpath(_real(folder) / value["path"])),
        directory=value["directory"],
        by_framework=value["by_framework"],
        inode=value["inode"],
        record=None if value["record"] is None else decode_record(value["record"]),
        replaced=frozenset(value["replaced"]),
    )


def _entries(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.iterdir()) if path.name != _NOTE)


def _put(written: Path, place: Path, replaced: frozenset[str]) -> None:
    """Move a file or a folder to `place`. In a folder that is there, files of other names stay. Raises OSError.

    `replaced` are files in that folder that do not stay.
    """
    if not _are_folders(written, place):
        _replace(written, place)
    elif _may_be_exchanged(written, place, replaced) and _exchange(written, place):
        # The program may have added a file just before.
        _return_others(written, place, replaced)
    else:
        for name in replaced:
            (place / name).unlink(missing_ok=True)
        _merge(written, place)
    sync_directory(place.parent)


def _exchange(written: Path, place: Path) -> bool:
    for name in files_below(place) & files_below(written):
        _keep_mode(written / name, place / name)
    return operating_system.exchange(written, place)


def _may_be_exchanged(written: Path, place: Path, replaced: frozenset[str]) -> bool:
    """Whether nothing but its files tells one folder from the other, and it has none that stay."""
    ours, theirs = written.stat(), place.stat()
    if (ours.st_mode, ours.st_uid, ours.st_gid) != (theirs.st_mode, theirs.st_uid, theirs.st_gid):
        return False
    if Path.cwd().is_relative_to(place):
        return False
    there = files_below(place, folders=True)
    if any((place / name).is_symlink() for name in there):
        # What is saved there goes where the link leads.
        return False
    return there <= files_below(written, folders=True) | replaced


def _merge(written: Path, folder: Path) -> None:
    for entry in sorted(written.iterdir()):
        place = _place(entry, folder / entry.name)
        if _are_folders(entry, place):
            _merge(entry, place)
        else:
            _replace(entry, place)
    sync_directory(folder)


def _place(written: Path, path: Path) -> Path:
    """Follow the links of `path`, as a framework does that writes there. What it writes as a link replaces a link."""
    return path if written.is_symlink() else Path(os.path.realpath(path))


def _are_folders(written: Path, place: Path) -> bool:
    return written.is_dir() and not written.is_symlink() and place.is_dir()


def _return_others(before: Path, place: Path, replaced: frozenset[str]) -> None:
    """Move files that only the folder has that was here `before` to the one that is here now. Raises OSError."""
    for name in sorted(files_below(before) - files_below(place) - replaced) if before.is_dir() else ():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (before / name).rename(place / name)


def files_below(folder: Path, *, folders: bool = False) -> set[str]:
    """Return the relative paths of all files and links below a folder, and of `folders`, with a `/` at their end.

    Raises OSError.
    """

    def fail(error: OSError) -> None:
        raise error

    found = set()
    for parent, below, files in os.walk(folder, onerror=fail):
        links = [name for name in below if Path(parent, name).is_symlink()]
        found |= {os.path.relpath(Path(parent, name), folder) for name in (*files, *links)}
        if folders:
            found |= {os.path.relpath(Path(parent, name), folder) + "/" for name in below if name not in links}
    return found


def _keep_mode(written: Path, place: Path) -> None:
    """Give a file the mode of the one that it replaces, as if the program had written into that."""
    with suppress(OSError):
        if written.is_file() and place.is_file():
            written.chmod(place.stat().st_mode)


def _replace(written: Path, place: Path) -> None:
    _keep_mode(written, place)
    try:
        written.replace(place)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        # A program may have several mounts in its volume.
        copy = place.with_name(f"{names.SAVING_PREFIX}{written.parent.name}-{_inode(written)}")
        delete(copy)
        try:
            if written.is_dir():
                shutil.copytree(written, copy, symlinks=True)
            else:
                shutil.copy2(written, copy, follow_symlinks=False)
            list(sync_tree(copy))
            copy.replace(place)
        except BaseException:
            delete(copy)
            raise


def delete(path: Path) -> None:
    """Delete a file or a folder of ours, as far as it can be deleted."""
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def _real(path: Path) -> Path:
    """Return the path without links in its folder."""
    return Path(os.path.realpath(path.parent), path.name)


def _inode(path: Path) -> int:
    """Return its number; 0 if it is not there."""
    try:
        return path.lstat().st_ino
    except OSError:
        return 0


def _changed_ns(path: Path) -> int:
    """Return when its content was changed; 0 if it is not there."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0

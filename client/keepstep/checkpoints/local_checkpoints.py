"""The checkpoints of one run on this volume, by their records: which are whole, and which to delete.

Must not know the agent. Invariants: a checkpoint that has a record is complete and on disk. Nothing is deleted but
files that a record of the Checkpointer's names: a file that the program put beside them stays.

.saving-<save>              being written, see `staged_save`
.removing-<name>-<nonce>    being deleted, in the checkpoint directory; garbage
"""

import itertools
import logging
import os
import re
import shutil
import stat
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from keepstep.checkpoints.records import (
    Record,
    RecordedFile,
    damage,
    is_whole,
    read_records,
    remove_record,
    write_record,
)
from keepstep.checkpoints.staged_save import (
    StagedSave,
    delete,
    discard_older,
    files_below,
    has_note,
    saves_to_finish,
)
from keepstep_api import names

_log: Final = logging.getLogger("keepstep")
_SAVING: Final = names.SAVING_PREFIX
_REMOVING: Final = names.REMOVING_PREFIX
_OTHERS_BYTES: Final = 64 * 1024 * 1024
"""How much of a program's own files is stored with a checkpoint that is smaller; else as much as its own size."""
_MOST_LOOKED_AT: Final = 10_000


def directory_in(directory: Path, volume: Path, run_directory: Path) -> str:
    """Return what records call a directory: its path below the volume; empty for the run's checkpoint directory.

    What lies outside the volume keeps its whole path.
    """
    # Not by Path, which raises for links that form a loop.
    directory, volume, run_directory = (Path(os.path.realpath(path)) for path in (directory, volume, run_directory))
    if directory == run_directory:
        return ""
    return directory.relative_to(volume).as_posix() if directory.is_relative_to(volume) else directory.as_posix()


class LocalCheckpoints:
    """The checkpoints of one run.

    Args:
        volume: What the directories in records are relative to.
        directory: Where a Checkpointer's checkpoints lie.
        run_directory: Where the checkpoints lie of programs that name no directory.
        records: The folder of the records.
        saving: Where frameworks' checkpoints are written: programs that list their own directories do not see it.
        nonce: Keeps two processes' temporary names apart.
    """

    def __init__(
        self, *, volume: Path, directory: Path, run_directory: Path, records: Path, saving: Path, nonce: str
    ) -> None:
        self._volume = volume
        self._directory = directory
        self._run_directory = run_directory
        self._saving = saving
        self._nonce = nonce
        self._said: set[Path] = set()
        self.records: Final = records

    def path(self, name: str) -> Path:
        """Return where the Checkpointer's checkpoint of this name lies."""
        return self._directory / name

    def place(self, record: Record) -> Path:
        """Return where a checkpoint lies."""
        return self.folder(record.directory) / record.name

    def folder(self, directory: str) -> Path:
        """Return the directory that a record calls so."""
        return self._volume / directory if directory else self._run_directory

    def directory_of(self, path: Path) -> str:
        """Return what the record of a checkpoint at `path` has as its directory."""
        return directory_in(path.parent, self._volume, self._run_directory)

    def clean_up(self) -> None:
        """Finish what a killed process left complete, and delete what it left incomplete.

        Call it only when no such process can be alive. Raises OSError.
        """
        for parent in (self._directory, self._saving):
            if not parent.is_dir():
                continue
            for save in saves_to_finish(parent):
                try:
                    save.finish(self.records)
                    _log.info("a save that a killed process had completed has its place: path=%s", save.path)
                except OSError as error:
                    _log.warning("a complete save has no place yet: path=%s error=%s", save.path, error)
            for folder in parent.iterdir():
                if folder.name.startswith((_SAVING, _REMOVING)) and not has_note(folder):
                    delete(folder)

    def staged(self, save: str, path: Path, *, by_framework: bool) -> StagedSave:
        """Return the folder in which a save is written whose checkpoint belongs at `path`."""
        parent = self._saving if by_framework else self._directory
        return StagedSave(parent, save, path, directory=self.directory_of(path), by_framework=by_framework)

    def discard_older(self, path: Path) -> None:
        """Give up saves of frameworks that could not get the place `path`. Raises OSError."""
        discard_older(self._saving, path)

    def whole(self, *, by_framework: bool) -> Sequence[Record]:
        """Return the whole checkpoints of all directories, the newest first. Not those of frameworks: `by_framework`.

        Skips damaged ones, and forgets those that the program has deleted.
        """
        self.forget_deleted()
        return [
            record
            for record in read_records(self.records)
            if (by_framework or not record.by_framework) and is_whole(record, self.place(record))
        ]

    def find_renamed(self, record: Record) -> Record | None:
        """Return the record of a checkpoint as the program has renamed it; None if it is not there. Raises OSError.

        It is looked for in the folder in which it was.
        """
        place = self.place(record)
        if place.exists():
            return record
        if record.inode and place.parent.is_dir():
            with os.scandir(place.parent) as entries:
                name = next((one.name for one in entries if one.inode() == record.inode and not one.is_symlink()), None)
            # The number of a file that was deleted is given to another one, which is newer.
            if name is not None and _is_older(record, place.with_name(name)):
                return replace(record, name=name)
        return None

    def forget_deleted(self) -> None:
        """Remove the records of checkpoints that are deleted, and rename those of checkpoints that are renamed."""
        for record in read_records(self.records):
            try:
                renamed = self.find_renamed(record)
                if renamed is not None and renamed.name != record.name:
                    write_record(self.records, renamed)
                if renamed is None or renamed.name != record.name:
                    remove_record(self.records / record.file_name)
            except OSError as error:
                # Tried again at the next save; until then it does no harm.
                _log.warning("record not removed: name=%s error=%s", record.name, error)

    def others(self, record: Record) -> tuple[str, ...]:
        """Return the program's own files in the folder of this checkpoint, which belong to it, the newest first.

        Not the files of other checkpoints. Says once if there are more than are stored with a checkpoint.
        """
        folder = self.place(record).resolve()
        if not folder.is_dir():
            return ()
        checkpoints = {self.place(other).resolve() for other in read_records(self.records)} - {folder}
        sizes: dict[str, tuple[int, int]] = {}
        files = {file.path for file in record.files}
        for parent, folders, file_names in os.walk(folder):
            folders[:] = [
                name
                for name in folders
                if name != names.STATE_DIRECTORY
                and not name.startswith(names.TEMPORARY_PREFIXES)
                and Path(parent, name) not in checkpoints
            ]
            for path in (Path(parent, name) for name in file_names):
                name = path.relative_to(folder).as_posix()
                with suppress(OSError):
                    status = path.lstat()
                    is_own = name in files or path in checkpoints
                    # For another name, an agent would refuse the whole checkpoint.
                    if not is_own and stat.S_ISREG(status.st_mode) and name.isprintable() and len(name) < 256:
                        sizes[name] = status.st_mtime_ns, status.st_size
            if len(sizes) > _MOST_LOOKED_AT:
                break
        most_bytes = max(_OTHERS_BYTES, sum(file.size_bytes for file in record.files))
        newest = sorted(sizes, key=lambda name: sizes[name], reverse=True)
        running = itertools.accumulate(sizes[name][1] for name in newest)
        others = [name for name, total_bytes in zip(newest, running, strict=True) if total_bytes <= most_bytes]
        if len(others[: names.MOST_OTHERS]) < len(newest) and folder not in self._said:
            self._said.add(folder)
            _log.warning(
                "not all files beside a checkpoint are stored with it: path=%s stored=%d hint=give each checkpoint a "
                "folder of its own",
                folder,
                len(others[: names.MOST_OTHERS]),
            )
        return tuple(others[: names.MOST_OTHERS])

    def take_along(self, checkpoint: Path, into: Path) -> None:
        """Copy the program's own files from the folder of a checkpoint into another one that lacks them.

        Raises OSError.
        """
        record = next((one for one in read_records(self.records) if self.place(one) == checkpoint), None)
        if record is None or not into.is_dir():
            return
        there = tuple(RecordedFile(path=name, size_bytes=0) for name in files_below(into))
        others = self.others(replace(record, files=there))
        for name in others:
            try:
                (into / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(checkpoint / name, into / name)
            except OSError as error:
                # It is not worth the checkpoint.
                delete(into / name)
                _log.warning("a file of the program's is not taken along: path=%s error=%s", checkpoint / name, error)
        if others:
            _log.info("the program's own files of %s are in the just-in-time checkpoint too: %s", checkpoint, others)

    def rotate(self, newest: Record, keep: int, *, keep_restored: bool) -> None:
        """Delete the Checkpointer's whole checkpoints before `newest`, except the last `keep - 1`. Raises OSError.

        `keep_restored`: also keep those that came from the destination.
        """
        older = [
            record
            for record in read_records(self.records)
            if record.order < newest.order and record.directory == newest.directory and not record.by_framework
        ]
        whole = [record for record in older if damage(record, self.path(record.name)) is None]
        for record in whole[keep - 1 :]:
            if not (keep_restored and record.committed):
                self._remove(record)

    def make_room(self, *, stored: str) -> None:
        """Delete local copies of what the bucket is sure to keep, if the volume has no room for another checkpoint.

        That is the newest that is `stored`, by its save's id, and what this start was restored from. For a last save
        that has failed. Says what it deletes.
        """
        records = read_records(self.records)
        needed_bytes = max((sum(file.size_bytes for file in record.files) for record in records), default=0)
        if shutil.disk_usage(self._volume).free > needed_bytes:
            return
        for record in records:
            if not (record.committed or record.save == stored):
                continue
            try:
                self._remove(record)
            except OSError as error:
                _log.warning("an older checkpoint is not deleted: path=%s error=%s", self.place(record), error)
            else:
                _log.warning("deleted to make room, it is stored: path=%s", self.place(record))

    def drop_older_links(self, newest: Path, outside: Path, *, spared: Path | None) -> None:
        """Delete the checkpoints beside `newest` whose originals the program has deleted `outside`, but not `spared`.

        They were linked here, or saved just in time. A disk whose program deletes old checkpoints must not fill up.
        """
        for record in read_records(self.records):
            place = self.place(record)
            is_beside = place.parent == newest.parent and place not in (newest, spared)
            is_stored = record.committed or (record.announced and record.by_framework)
            if is_beside and is_stored and not (outside / record.name).exists():
                try:
                    self._remove(record)
                except OSError as error:
                    _log.warning("an older checkpoint is not deleted: path=%s error=%s", place, error)

    def _remove(self, record: Record) -> None:
        path = self.place(record)
        files = {file.path for file in record.files}
        if path.is_dir() and not files_below(path) <= files:
            # The program has put files beside them.
            remove_record(self.records / record.file_name)
            for file in files:
                # What is reached by a link lies somewhere else.
                if (path / file).parent.resolve().is_relative_to(path.resolve()):
                    (path / file).unlink(missing_ok=True)
            for folder in sorted({parent for file in files for parent in Path(file).parents}, reverse=True):
                with suppress(OSError):
                    (path / folder).rmdir()
            return
        # Nothing half-deleted has its name.
        removing = self._directory / f"{_REMOVING}{record.name}-{self._nonce}"
        path.rename(removing)
        remove_record(self.records / record.file_name)
        delete(removing)


def _is_older(record: Record, checkpoint: Path) -> bool:
    """Whether all files of the record are in the checkpoint, and were written before the record."""
    files = [checkpoint / file.path for file in record.files]
    return damage(record, checkpoint) is None and all(path.stat().st_mtime <= record.saved_at for path in files)


def next_name(last_name: str | None, last_step: int, step: int, *, default: str) -> str:
    """Return `last_name` with `step` in place of `last_step`; `default` if that is None or lacks its step.

    Also `default` if the step is in the name more than once. Programs find their checkpoints by name, and often read
    the step from it.
    """
    if last_name is None:
        return default
    name, replaced = re.subn(rf"(?<!\d){last_step}(?!\d)", str(step), last_name)
    return name if replaced == 1 else default

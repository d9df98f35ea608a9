"""The checkpoint directory: how a checkpoint gets its name there, which ones are whole, which ones to delete.

Owns every name in that directory that begins with a dot and every record. Must not know the agent. Invariants: what is
called `checkpoint-<step>` is complete and on disk. Nothing without a record is ever deleted, except the checkpoint
whose name a new one takes, and that new one if it was never recorded. After a crash at any point, `clean_up` and
`whole` find the newest complete checkpoint.

.saving-<name>-<nonce>      being written; garbage once its process is gone
.replaced-<name>-<save>     had the name that a new one is taking; gets it back while the record is still of its save
.removing-<name>-<nonce>    being deleted; garbage
"""

import contextlib
import logging
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from keepstep.checkpoints.durable import sync_directory, sync_tree
from keepstep.checkpoints.records import (
    Record,
    RecordedFile,
    damage,
    is_whole,
    read_records,
    remove_record,
    write_record,
)
from keepstep_api import names

_log: Final = logging.getLogger("keepstep")
SAVING: Final = names.SAVING_PREFIX
_REPLACED: Final = names.REPLACED_PREFIX
_REMOVING: Final = names.REMOVING_PREFIX
_REPLACED_NAME: Final = re.compile(re.escape(_REPLACED) + r"(?P<name>checkpoint-\d+)-(?P<save>.+)")


class LocalCheckpoints:
    """The complete checkpoints of one run on this volume. `nonce` keeps two processes' temporary names apart."""

    def __init__(self, directory: Path, records_directory: Path, nonce: str) -> None:
        self._directory = directory
        self._records = records_directory
        self._nonce = nonce
        self._replaced: dict[str, Path] = {}

    def path(self, name: str) -> Path:
        return self._directory / name

    def clean_up(self) -> None:
        """Clean up what a killed process left. Call it only when no such process can be alive. Raises OSError."""
        if not self._directory.is_dir():
            return
        for path in sorted(self._directory.iterdir()):
            if path.name.startswith((SAVING, _REMOVING)):
                _delete(path)
            elif (replaced := _REPLACED_NAME.fullmatch(path.name)) is not None:
                self._settle(path, replaced["name"], replaced["save"])

    def being_saved(self, name: str) -> Path:
        """Return the directory that `begin` makes; the ranks of a pod share it."""
        return self._temporary(SAVING, name)

    def whole(self) -> Sequence[Record]:
        """Return the whole checkpoints, the newest first. Forgets those that are gone, and skips damaged ones."""
        found: list[Record] = []
        for record in read_records(self._records):
            checkpoint = self.path(record.name)
            if record.directory is not None:
                continue
            if not checkpoint.exists():
                self._forget(record.name)
            elif is_whole(record, checkpoint):
                found.append(record)
        return found

    def begin(self, name: str) -> Path:
        """Make an empty directory to write a checkpoint into. Raises OSError."""
        temporary = self._temporary(SAVING, name)
        _delete(temporary)
        temporary.mkdir(parents=True)
        return temporary

    def abandon(self, name: str) -> None:
        """Remove the directory that `begin` made, if it was not published."""
        _delete(self._temporary(SAVING, name))

    def publish(self, name: str) -> tuple[RecordedFile, ...]:
        """Make what was written durable, give it its name, and return its files.

        Raises OSError, with the name untouched unless only the last sync of the directory failed.
        """
        temporary, final = self._temporary(SAVING, name), self.path(name)
        files = tuple(RecordedFile(path=path, size_bytes=size_bytes) for path, size_bytes in sync_tree(temporary))
        if not files:
            raise FileNotFoundError(f"nothing was saved in {temporary}")
        aside: Path | None = None
        if final.exists():
            aside = self._replaced[name] = self._set_aside(name)
        try:
            temporary.rename(final)
        except OSError:
            if aside is not None:
                aside.rename(final)
            raise
        sync_directory(self._directory)
        return files

    def has_room(self, name: str) -> bool:
        """Make the directory `being_saved`, which ranks of one pod may do at once. Returns whether it is there."""
        try:
            self.being_saved(name).mkdir(parents=True, exist_ok=True)
        except OSError:
            return False
        return True

    def move_to(self, path: Path) -> bool:
        """Move what a framework wrote, below its own name in `being_saved`, to `path`. Returns False if that fails.

        Then what it wrote beside it, such as a file that names its newest checkpoint. Does nothing where this pod has
        no part in it.
        """
        folder = self.being_saved(path.name)
        written = folder / path.name
        try:
            if written.exists():
                # A file takes the place of another one at once: a program never finds its name without one.
                if path.is_dir() or (written.is_dir() and path.exists()):
                    removing = self._temporary(_REMOVING, path.name)
                    shutil.move(path, removing)
                    _delete(removing)
                path.parent.mkdir(parents=True, exist_ok=True)
                # Not by rename, which cannot cross mounts, and a program may have several in its volume.
                shutil.move(written, path)
                for beside in sorted(folder.iterdir()):
                    shutil.move(beside, path.with_name(beside.name))
        except OSError as error:
            _log.warning("checkpoint not moved to its place: path=%s error=%s", path, error)
            return False
        _delete(folder)
        return True

    def take_back(self, name: str) -> None:
        """Undo `publish`, for a checkpoint that was not recorded. Raises OSError."""
        self._remove(name)
        aside = self._replaced.pop(name, None)
        if aside is not None:
            aside.rename(self.path(name))

    def record(self, record: Record) -> None:
        """Write the record: from then on the checkpoint may be resumed from, and rotated. Raises OSError."""
        write_record(self._records, record)
        # Until the record was written, the replaced checkpoint was the one to resume from.
        replaced = self._replaced.pop(record.name, None)
        if replaced is not None:
            _delete(replaced)

    def rotate(self, newest: Record, keep: int, *, keep_restored: bool) -> None:
        """Delete the whole checkpoints before `newest`, except the last `keep - 1` of them. Raises OSError.

        `keep_restored`: also keep those that came from the destination.
        """
        older = [
            record for record in read_records(self._records) if record.order < newest.order and record.directory is None
        ]
        whole = [record for record in older if damage(record, self.path(record.name)) is None]
        for record in whole[keep - 1 :]:
            if keep_restored and record.committed:
                continue
            removing = self._temporary(_REMOVING, record.name)
            self.path(record.name).rename(removing)
            remove_record(self._records, record.name)
            _delete(removing)

    def _set_aside(self, name: str) -> Path:
        """Free a name; return where the checkpoint that had it lies."""
        aside = self._directory / f"{_REPLACED}{name}-{self._recorded_save(name) or self._nonce}"
        if aside.exists():
            # A save whose record failed has the name; the recorded checkpoint was set aside at that save.
            self._remove(name)
        else:
            self.path(name).rename(aside)
        return aside

    def _settle(self, aside: Path, name: str, save: str) -> None:
        """Finish a replacement during which the process was killed: the record says which checkpoint gets the name."""
        final = self.path(name)
        if not final.exists():
            aside.rename(final)
        elif self._recorded_save(name) == save:
            self._remove(name)
            aside.rename(final)
        else:
            _delete(aside)

    def _recorded_save(self, name: str) -> str:
        return next((record.save for record in read_records(self._records) if record.name == name), "")

    def _remove(self, name: str) -> None:
        """Rename a checkpoint, then delete it, so that nothing half-deleted has its name."""
        removing = self._temporary(_REMOVING, name)
        self.path(name).rename(removing)
        _delete(removing)

    def _temporary(self, prefix: str, name: str) -> Path:
        return self._directory / f"{prefix}{name}-{self._nonce}"

    def _forget(self, name: str) -> None:
        try:
            remove_record(self._records, name)
        except OSError as error:
            _log.warning("record not removed: name=%s error=%s", name, error)


def _delete(path: Path) -> None:
    # What cannot be deleted is garbage by its name, and the next start tries again.
    if os.path.isdir(path):  # noqa: PTH112 - Path's raises when the volume fails
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def next_name(last_name: str | None, last_step: int, step: int, *, default: str) -> str:
    """Return `last_name` with `step` in place of `last_step`; `default` if that is None or lacks its step.

    Also `default` if the step is in the name more than once. Programs find their checkpoints by name, and often read
    the step from it.
    """
    if last_name is None:
        return default
    name, replaced = re.subn(rf"(?<!\d){last_step}(?!\d)", str(step), last_name)
    return name if replaced == 1 else default

"""Checkpoints that are whole on the local volume: their records, and putting one in its place.

Owns `<volume>/.mooring/records/`, the record of what was resumed from, and the way from `incoming/` to the checkpoint
directory. Invariants: a record is written after its checkpoint is whole and in place, and removed before that place
changes; what another save left under that name is moved aside first and removed last. All functions block. They
raise VolumeError only.
"""

import json
import shutil
import stat
from pathlib import Path
from typing import Any, Final

from mooring_agent.adapters.checksum import region_checksum
from mooring_agent.adapters.volume.durable_files import sync_folder, write_durably
from mooring_agent.adapters.volume.errors import folder_error, volume_error
from mooring_agent.catalog import CommittedCheckpoint, StoredFile
from mooring_agent.core.errors import ErrorKind, VolumeError
from mooring_agent.core.model import Fingerprint, Region
from mooring_api.names import INCOMING_DIRECTORY, RECORDS_DIRECTORY, RESUMED, STATE_DIRECTORY

_REPLACED_SUFFIX: Final = ".replaced"


class LocalCopies:
    """The checkpoints of one volume and one checkpoint directory."""

    def __init__(self, volume: Path, checkpoint_directory: Path) -> None:
        self._checkpoints = checkpoint_directory
        self._incoming = volume / STATE_DIRECTORY / INCOMING_DIRECTORY
        self._records = volume / STATE_DIRECTORY / RECORDS_DIRECTORY
        self._resumed = volume / STATE_DIRECTORY / RESUMED

    def prepare(self) -> None:
        """Make the folders, and remove what an earlier restore left half-made."""
        try:
            for folder in (self._incoming, self._records, self._checkpoints):
                folder.mkdir(parents=True, exist_ok=True)
            for garbage in self._incoming.iterdir():
                _remove(garbage)
            if self._incoming.stat().st_dev != self._checkpoints.stat().st_dev:
                raise VolumeError(
                    ErrorKind.VOLUME_UNUSABLE,
                    f"{self._checkpoints} and {self._incoming} are on different filesystems",
                    hint="let the checkpoint directory lie in the shared volume: a restore ends with one rename",
                )
        except OSError as error:
            raise folder_error(error, f"preparing {self._incoming}") from error

    def incoming(self, checkpoint: CommittedCheckpoint) -> Path:
        """Where a checkpoint is gathered."""
        return self._incoming / checkpoint.marker.info.save

    def place(self, checkpoint: CommittedCheckpoint) -> Path:
        """Where it goes."""
        return self._checkpoints / checkpoint.marker.info.name

    def discard(self, checkpoint: CommittedCheckpoint) -> None:
        """Drop what was gathered of a checkpoint, if anything."""
        try:
            _remove(self.incoming(checkpoint))
        except OSError as error:
            raise volume_error(error, f"removing {self.incoming(checkpoint)}") from error

    def holds(self, checkpoint: CommittedCheckpoint) -> bool:
        """Whether this very save is in place, with every byte as it was written.

        The bytes are read again: that is much cheaper than to fetch them, and warms the page cache for the trainer.
        """
        record = self._read_record(checkpoint)
        if not record or record.get("save") != checkpoint.marker.info.save:
            return False
        try:
            place = self.place(checkpoint)
            return all(_is_intact(place / _path_in(checkpoint, file), file) for file in checkpoint.files)
        except (OSError, VolumeError):
            return False

    def install(self, checkpoint: CommittedCheckpoint) -> None:
        """Move a gathered checkpoint into its place and record it."""
        place = self.place(checkpoint)
        replaced = self._incoming / f"{checkpoint.marker.info.save}{_REPLACED_SUFFIX}"
        try:
            self._record_path(checkpoint).unlink(missing_ok=True)
            if place.exists() or place.is_symlink():
                place.rename(replaced)
            gathered = self.incoming(checkpoint)
            (gathered / checkpoint.files[0].entry.path if checkpoint.single_file else gathered).rename(place)
            sync_folder(place.parent)
            self.record(checkpoint)
            _remove(replaced)
        except OSError as error:
            raise volume_error(error, f"putting {place} in its place") from error

    def record(self, checkpoint: CommittedCheckpoint) -> None:
        """Say that the checkpoint in place is whole and committed, and what this volume resumes from.

        The client reads the former, the agent the latter.
        """
        info = checkpoint.marker.info
        record = {
            "name": info.name,
            "step": info.step,
            "save": info.save,
            "kind": info.kind.value,
            "world_size": info.world_size,
            "saved_at": checkpoint.marker.saved_at,
            "committed": True,
            "files": [{"path": _path_in(checkpoint, file), "size": file.entry.size_bytes} for file in checkpoint.files],
        }
        encoded = json.dumps(record, sort_keys=True).encode() + b"\n"
        try:
            # First: what is trained from must not be pruned.
            write_durably(self._resumed, encoded)
            write_durably(self._record_path(checkpoint), encoded)
        except OSError as error:
            raise volume_error(error, f"writing {self._record_path(checkpoint)}") from error

    def _record_path(self, checkpoint: CommittedCheckpoint) -> Path:
        return self._records / f"{checkpoint.marker.info.name}.json"

    def _read_record(self, checkpoint: CommittedCheckpoint) -> dict[str, Any]:
        try:
            record = json.loads(self._record_path(checkpoint).read_bytes())
        except (OSError, ValueError):
            return {}
        return record if isinstance(record, dict) else {}


def _path_in(checkpoint: CommittedCheckpoint, file: StoredFile) -> str:
    """Below the checkpoint's place; empty where that is the file itself."""
    return "" if checkpoint.single_file else file.entry.path


def _is_intact(path: Path, file: StoredFile) -> bool:
    status = path.stat()
    if not stat.S_ISREG(status.st_mode) or status.st_size != file.entry.size_bytes:
        return False
    fingerprint = Fingerprint(size_bytes=status.st_size, mtime_ns=status.st_mtime_ns, inode=status.st_ino)
    return all(
        region_checksum(
            Region(path=str(path), offset_bytes=part.offset_bytes, size_bytes=part.size_bytes, fingerprint=fingerprint)
        )
        == file.entry.checksums[part.number - 1]
        for part in file.entry.parts()
    )


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)

"""Keeps records of the checkpoints that are whole on the local volume, and puts a downloaded one in its place.

Owns `<volume>/.keepstep/records/`, the record of what was resumed from, and the move from `incoming/` to the checkpoint
directory. Invariants: a record is written after its checkpoint is whole and in place, and removed before that place
changes; what another save left under that name is moved aside first and removed last. All functions block. They
raise VolumeError only.
"""

import stat
from pathlib import Path
from typing import Final

from keepstep_agent.adapters.checksum import region_checksum
from keepstep_agent.adapters.records import recorded_save
from keepstep_agent.adapters.region_file import part_region
from keepstep_agent.adapters.volume.announced_files import resolve_path
from keepstep_agent.adapters.volume.errors import folder_error, volume_error
from keepstep_agent.adapters.volume.shared_folders import make_own_folder, make_state_directory, open_state_directory
from keepstep_agent.adapters.volume.shared_volume import fingerprint, open_volume, path_in
from keepstep_agent.catalog.reading import CommittedCheckpoint, StoredFile
from keepstep_agent.core.errors import VolumeError
from keepstep_api.names import INCOMING_DIRECTORY, RECORDS_DIRECTORY, RESUMED, STATE_DIRECTORY
from keepstep_api.records import SUFFIX, Record, RecordedFile

_INCOMING: Final = f"{STATE_DIRECTORY}/{INCOMING_DIRECTORY}"
_RECORDS: Final = f"{STATE_DIRECTORY}/{RECORDS_DIRECTORY}"
_REPLACED_SUFFIX: Final = ".replaced"


class LocalCopies:
    """The checkpoints in one checkpoint directory below one volume. All paths are below the volume."""

    def __init__(self, volume: Path, checkpoint_directory: Path, state_directory: Path) -> None:
        self._volume = volume
        self._directory = checkpoint_directory
        self._state_directory = state_directory
        self._checkpoints = ""

    def prepare(self, *, keep: str = "") -> None:
        """Make the folders, and remove what an earlier restore left unfinished, except of the save `keep`."""
        make_state_directory(self._volume, self._state_directory)
        try:
            with open_volume(self._volume) as root:
                make_own_folder(root).close()
                root.make_folder(_RECORDS).close()
                with root.make_folder(_INCOMING) as incoming:
                    for garbage in incoming.entries():
                        if garbage.name != keep:
                            incoming.remove(garbage.name)
                if self._directory.is_relative_to(self._volume) and not self._directory.exists():
                    root.make_folder(path_in(self._volume, self._directory)).close()
            self._checkpoints = resolve_path(self._volume, str(self._directory))
        except OSError as error:
            raise folder_error(error, f"preparing {self._volume}/{_INCOMING} and {self._directory}") from error

    def incoming(self, checkpoint: CommittedCheckpoint) -> str:
        """Return where a checkpoint is downloaded to, relative to the volume."""
        return f"{_INCOMING}/{checkpoint.marker.info.save}"

    def place(self, checkpoint: CommittedCheckpoint) -> Path:
        """Return where a checkpoint goes, as the trainer sees it."""
        return self._directory / checkpoint.marker.info.name

    def discard(self, checkpoint: CommittedCheckpoint) -> None:
        """Remove what was downloaded of a checkpoint, if anything."""
        try:
            with open_volume(self._volume) as root:
                root.remove(self.incoming(checkpoint))
        except OSError as error:
            raise volume_error(error, f"removing {self.incoming(checkpoint)}") from error

    def is_recorded(self, checkpoint: CommittedCheckpoint) -> bool:
        """Return whether a checkpoint of this very save was in place here: all of it, or what this pod contributed."""
        return recorded_save(self._volume, _record_path(checkpoint)) == checkpoint.marker.info.save

    def path_of(self, checkpoint: CommittedCheckpoint, file: StoredFile) -> str:
        """Return where a file goes, relative to the volume."""
        return f"{self._place(checkpoint)}/{_path_in(checkpoint, file)}".rstrip("/")

    def holds(self, checkpoint: CommittedCheckpoint) -> bool:
        """Return whether this very save is in place, with every byte as it was written.

        The bytes are read again: that is much cheaper than fetching them, and warms the page cache for the trainer.
        """
        if not self.is_recorded(checkpoint):
            return False
        try:
            return all(self._is_intact(self.path_of(checkpoint, file), file) for file in checkpoint.files)
        except (OSError, VolumeError):
            return False

    def install(self, checkpoint: CommittedCheckpoint) -> None:
        """Move a downloaded checkpoint into its place and record it."""
        place = self._place(checkpoint)
        replaced = f"{_INCOMING}/{checkpoint.marker.info.save}{_REPLACED_SUFFIX}"
        gathered = self.incoming(checkpoint)
        if checkpoint.single_file:
            gathered += f"/{checkpoint.files[0].entry.path}"
        try:
            with open_volume(self._volume) as root:
                root.unlink(_record_path(checkpoint))
                if root.exists(place):
                    root.rename(place, root, replaced)
                root.rename(gathered, root, place)
                with root.folder(self._checkpoints) as folder:
                    folder.sync()
                self.record(checkpoint)
                root.remove(replaced)
        except OSError as error:
            raise volume_error(error, f"putting {self.place(checkpoint)} in its place") from error

    def record(self, checkpoint: CommittedCheckpoint) -> None:
        """Record that the checkpoint in place is whole and committed, and that this volume resumes from it.

        The client reads the first record, the agent the second.
        """
        # The agent's comes first: a checkpoint that training continues from must not be pruned.
        self.note_resumed(checkpoint)
        try:
            with open_volume(self._volume) as root:
                root.write_durably(_record_path(checkpoint), _encoded_record(checkpoint))
        except OSError as error:
            raise volume_error(error, f"writing {_record_path(checkpoint)}") from error

    def note_resumed(self, checkpoint: CommittedCheckpoint) -> None:
        """Record that this volume resumes from the checkpoint."""
        try:
            with open_state_directory(self._volume, self._state_directory) as state:
                state.write_durably(RESUMED, _encoded_record(checkpoint))
        except OSError as error:
            raise volume_error(error, f"writing {self._state_directory}/{RESUMED}") from error

    def _place(self, checkpoint: CommittedCheckpoint) -> str:
        name = checkpoint.marker.info.name
        return f"{self._checkpoints}/{name}" if self._checkpoints else name

    def _is_intact(self, path: str, file: StoredFile) -> bool:
        with open_volume(self._volume) as root:
            status = root.status(path)
        if not stat.S_ISREG(status.st_mode) or status.st_size != file.entry.size_bytes:
            return False
        return all(
            region_checksum(part_region(self._volume, path, part, fingerprint(status))) == checksum
            for part, checksum in zip(file.entry.parts(), file.entry.checksums, strict=True)
        )


def _encoded_record(checkpoint: CommittedCheckpoint) -> bytes:
    info = checkpoint.marker.info
    return Record(
        name=info.name,
        step=info.step,
        save=info.save,
        kind=info.kind,
        world_size=info.world_size,
        saved_at=checkpoint.marker.saved_at,
        committed=True,
        files=tuple(
            RecordedFile(path=_path_in(checkpoint, file), size_bytes=file.entry.size_bytes) for file in checkpoint.files
        ),
    ).encode()


def _record_path(checkpoint: CommittedCheckpoint) -> str:
    return f"{_RECORDS}/{checkpoint.marker.info.name}{SUFFIX}"


def _path_in(checkpoint: CommittedCheckpoint, file: StoredFile) -> str:
    """Return the file's path below the checkpoint's place; empty if the place is the file itself."""
    return "" if checkpoint.single_file else file.entry.path

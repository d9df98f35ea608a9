"""Keeps records of the checkpoints that are whole on the local volume, and puts a downloaded one in its place.

Owns `<volume>/.keepstep/records/`, the record of what was resumed from, and the move from `incoming/` to the checkpoint
directory. Invariants: a record is written after its checkpoint is whole and in place, and moved away before another one
gets that place. What had the place is moved to `replaced/` with its record. Only the files that this record names are
then removed, and all others go back. So a restore that is killed leaves the old checkpoint or the new one, and no file
of the user's is lost. All functions block. They raise VolumeError only.
"""

import errno
import stat
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Final

import structlog

from keepstep_agent.adapters.checksum import region_checksum
from keepstep_agent.adapters.records import recorded_files, recorded_save
from keepstep_agent.adapters.region_file import part_region
from keepstep_agent.adapters.volume.announced_files import resolve_path
from keepstep_agent.adapters.volume.errors import folder_error, volume_error
from keepstep_agent.adapters.volume.shared_folders import (
    make_own_folder,
    make_shared_folder,
    make_state_directory,
    open_state_directory,
)
from keepstep_agent.adapters.volume.shared_volume import Folder, fingerprint, open_volume, path_in
from keepstep_agent.catalog.reading import CommittedCheckpoint, StoredFile
from keepstep_agent.core.errors import VolumeError
from keepstep_agent.core.file_lists import Columns
from keepstep_agent.core.limits import PATH_BYTES
from keepstep_agent.restore.strange_files import put_back, remove_recorded
from keepstep_api.names import (
    INCOMING_DIRECTORY,
    RECORDS_DIRECTORY,
    REPLACED_DIRECTORY,
    RESUMED,
    STATE_DIRECTORY,
)
from keepstep_api.records import Record, RecordedFile, record_file

_INCOMING: Final = f"{STATE_DIRECTORY}/{INCOMING_DIRECTORY}"
_RECORDS: Final = f"{STATE_DIRECTORY}/{RECORDS_DIRECTORY}"
_REPLACED: Final = f"{STATE_DIRECTORY}/{REPLACED_DIRECTORY}"
_CONTENT: Final = "content"
_RECORD: Final = "record"
_PLACE: Final = "place"
"""Holds where the content belongs, relative to the volume."""
_SHOWN_FILES: Final = 5

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


class LocalCopies:
    """The checkpoints of one volume. All paths are below the volume."""

    def __init__(self, volume: Path, checkpoint_directory: Path, state_directory: Path) -> None:
        self._volume = volume
        self._directory = checkpoint_directory
        self._state_directory = state_directory
        self._checkpoints = ""

    def prepare(self, *, keep: str = "") -> None:
        """Make the folders, and clear up what an earlier restore left unfinished, except of the save `keep`."""
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
            with open_volume(self._volume) as root:
                self._settle_all(root)
        except OSError as error:
            raise folder_error(error, f"preparing {self._volume}/{_INCOMING} and {self._directory}") from error

    def incoming(self, checkpoint: CommittedCheckpoint) -> str:
        """Return where a checkpoint is downloaded to, relative to the volume."""
        return f"{_INCOMING}/{checkpoint.marker.info.save}"

    def place(self, checkpoint: CommittedCheckpoint) -> Path:
        """Return where a checkpoint goes, as the trainer sees it."""
        info = checkpoint.marker.info
        return (self._volume / info.directory if info.directory else self._directory) / info.name

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
        """Move a downloaded checkpoint into its place and record it. Files there that no record names stay."""
        place, record = self._place(checkpoint), _record_path(checkpoint)
        key = _record_file(checkpoint)
        replaced = f"{_REPLACED}/{key}"
        gathered = self.incoming(checkpoint)
        if checkpoint.single_file:
            gathered += f"/{checkpoint.files[0].entry.path}"
        try:
            with open_volume(self._volume) as root:
                self._settle(root, key)
                if root.exists(replaced):
                    raise FileExistsError(errno.EEXIST, "what an earlier restore has replaced is still there", replaced)
                self._make_folders(root, place)
                if root.exists(place):
                    root.make_folder(replaced).close()
                    root.write_durably(f"{replaced}/{_PLACE}", place.encode())
                    root.rename(place, root, f"{replaced}/{_CONTENT}")
                    if root.exists(record):
                        root.rename(record, root, f"{replaced}/{_RECORD}")
                else:
                    root.unlink(record)
                try:
                    root.rename(gathered, root, place)
                except OSError:
                    self._settle(root, key)
                    raise
                _sync_above(root, place)
                self.record(checkpoint)
                self._settle(root, key)
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
                root.write_durably(_record_path(checkpoint), _record(checkpoint).pieces())
        except OSError as error:
            raise volume_error(error, f"writing {_record_path(checkpoint)}") from error

    def note_resumed(self, checkpoint: CommittedCheckpoint) -> None:
        """Record that this volume resumes from the checkpoint."""
        try:
            with open_state_directory(self._volume, self._state_directory) as state:
                state.write_durably(RESUMED, _record(checkpoint).pieces())
        except OSError as error:
            raise volume_error(error, f"writing {self._state_directory}/{RESUMED}") from error

    def _settle_all(self, root: Folder) -> None:
        """Settle what restores that were killed have left."""
        with suppress(FileNotFoundError), root.folder(_REPLACED) as replaced:
            for entry in replaced.entries():
                self._settle(root, entry.name)

    def _settle(self, root: Folder, key: str) -> None:
        """End the replacement of the checkpoint whose record is called `key`, however far it got.

        Idempotent; a failure is only logged. If the new one has not got the place, the old one gets it back, with its
        record. A record of the old one lies here only after its content: without that, the replacement is over.
        """
        replaced, record = f"{_REPLACED}/{key}", f"{_RECORDS}/{key}"
        content, old_record = f"{replaced}/{_CONTENT}", f"{replaced}/{_RECORD}"
        place = ""
        set_aside: list[str] = []
        try:
            if not root.exists(replaced):
                return
            if root.exists(content):
                place = root.read(f"{replaced}/{_PLACE}", PATH_BYTES).decode()
                has_moved = root.exists(place) or (root.exists(old_record) and root.exists(record))
                if has_moved:
                    remove_recorded(root, content, recorded_files(root, old_record, key))
                elif root.exists(old_record):
                    root.rename(old_record, root, record)
            if root.exists(content):
                above, _, name = place.rpartition("/")
                with root.folder(replaced) as source, root.folder(above) as target:
                    set_aside += put_back(source, _CONTENT, target, name)
                    target.sync()
            root.remove(replaced)
        except (OSError, ValueError) as error:
            _log.warning(
                "restore.replaced_kept",
                path=str(self._volume / replaced),
                error=str(error),
                hint=f"move what is yours there to {self._volume / place}; the next restore tries again",
            )
        if set_aside:
            _log.warning(
                "restore.set_aside",
                directory=str((self._volume / place).parent),
                paths=set_aside[:_SHOWN_FILES],
                count=len(set_aside),
                hint="no record of Keepstep's names them, and restored files have their names now: "
                "remove what you do not need",
            )

    def _place(self, checkpoint: CommittedCheckpoint) -> str:
        info = checkpoint.marker.info
        directory = info.directory or self._checkpoints or "."
        return info.name if directory == "." else f"{directory}/{info.name}"

    def _make_folders(self, root: Folder, place: str) -> None:
        """Make the folders that a checkpoint lies in. They are gone with the disk on which it was saved."""
        for folder in reversed([str(folder) for folder in PurePosixPath(place).parents if folder.name]):
            make_shared_folder(root, folder)

    def _is_intact(self, path: str, file: StoredFile) -> bool:
        with open_volume(self._volume) as root:
            status = root.status(path)
        if not stat.S_ISREG(status.st_mode) or status.st_size != file.entry.size_bytes:
            return False
        return all(
            region_checksum(part_region(self._volume, path, part, fingerprint(status))) == checksum
            for part, checksum in zip(file.entry.parts(), file.entry.checksums, strict=True)
        )


class _RecordedFiles(Columns[RecordedFile]):
    """The files that the record of a restored checkpoint names. Each is made when it is written."""

    __slots__ = ("_checkpoint",)

    def __init__(self, checkpoint: CommittedCheckpoint) -> None:
        self._checkpoint = checkpoint

    def __len__(self) -> int:
        return len(self._checkpoint.files)

    def _item(self, position: int) -> RecordedFile:
        file = self._checkpoint.files[position]
        return RecordedFile(path=_path_in(self._checkpoint, file), size_bytes=file.entry.size_bytes)


def _record(checkpoint: CommittedCheckpoint) -> Record:
    info = checkpoint.marker.info
    return Record(
        name=info.name,
        step=info.step,
        save=info.save,
        kind=info.kind,
        world_size=info.world_size,
        saved_at=checkpoint.marker.saved_at,
        committed=True,
        directory=info.directory,
        output=info.output,
        files=_RecordedFiles(checkpoint),
    )


def _record_path(checkpoint: CommittedCheckpoint) -> str:
    return f"{_RECORDS}/{_record_file(checkpoint)}"


def _record_file(checkpoint: CommittedCheckpoint) -> str:
    info = checkpoint.marker.info
    return record_file(info.directory, info.name)


def _sync_above(root: Folder, path: str) -> None:
    """Make a new name durable, with those of the folders that it lies in."""
    for above in PurePosixPath(path).parents:
        if not above.name:
            root.sync()
            return
        with root.folder(str(above)) as folder:
            folder.sync()


def _path_in(checkpoint: CommittedCheckpoint, file: StoredFile) -> str:
    """Return the file's path below the checkpoint's place; empty if the place is the file itself."""
    return "" if checkpoint.single_file else file.entry.path

"""Reads the client's records: checkpoints that were not announced, and the save that this volume was resumed from.

The trainer can write a record, so it is untrusted input: its types are checked, it must be within `core.limits`, and
its list of files is compared with what is on the volume.
"""

import heapq
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Final, Literal, TypeVar

import msgspec
import structlog
from msgspec import Meta

from keepstep_agent.adapters.volume.announced_files import resolve_path
from keepstep_agent.adapters.volume.content_check import content_signature
from keepstep_agent.adapters.volume.shared_volume import Folder, open_volume
from keepstep_agent.core.errors import KeepstepError, RequestError
from keepstep_agent.core.limits import (
    CLIENT_RECORD_BYTES,
    CLIENT_RECORDS,
    FILES_PER_RANK,
    LOCAL_RANKS,
    RECORD_BYTES,
    Count,
    Moment,
    NameText,
    OtherNames,
    PathText,
    Rank,
    Step,
    WorldSize,
)
from keepstep_agent.core.model import Kind
from keepstep_agent.core.stored.object_layout import check_token
from keepstep_api.names import RECORDS_DIRECTORY, STATE_DIRECTORY
from keepstep_api.records import SUFFIX, belongs_to, record_file


class _Saved(msgspec.Struct):
    """The part of a record that tells its save. Its files are not decoded: the trainer can write millions of them."""

    save: str


def recorded_save(volume: Path, path: str) -> str:
    """Return the save id in the record at `path` below the volume; empty if none can be read."""
    try:
        with open_volume(volume) as folder:
            return msgspec.json.decode(folder.read(path, RECORD_BYTES), type=_Saved).save
    except (OSError, ValueError, RecursionError):
        return ""


class _Named(msgspec.Struct, frozen=True):
    """The part of a record that tells its files. That of a restored checkpoint has the files of all ranks."""

    name: NameText
    files: tuple["_File", ...]
    directory: PathText = ""


def recorded_files(root: Folder, path: str, name: str) -> tuple[str, ...]:
    """Return the files that the record at `path` below the volume names; none if it is not the record called `name`.

    They are relative to the checkpoint; nothing else is known of them.
    """
    try:
        record = msgspec.json.decode(root.read(path, RECORD_BYTES), type=_Named)
    except (OSError, ValueError, RecursionError):
        return ()
    is_named = record_file(record.directory, record.name) == name
    return tuple(file.path for file in record.files) if is_named else ()


_FOLDER: Final = f"{STATE_DIRECTORY}/{RECORDS_DIRECTORY}"
_UNREADABLE: Final = (OSError, ValueError)

log = structlog.get_logger("keepstep.unannounced")


class _Head(msgspec.Struct, frozen=True, kw_only=True):
    """A record without its files, which the decoder skips."""

    format: Literal[1]
    name: NameText
    step: Step
    save: NameText
    kind: Kind
    world_size: WorldSize
    saved_at: Moment
    committed: bool = False
    announced: bool = False
    directory: PathText = ""
    output: PathText = ""
    ranks: Annotated[tuple[Rank, ...], Meta(max_length=LOCAL_RANKS)] = ()


class _File(msgspec.Struct, frozen=True):
    path: PathText
    size: Count


class _Files(msgspec.Struct, frozen=True):
    files: Annotated[tuple[_File, ...], Meta(min_length=1, max_length=FILES_PER_RANK)]
    others: OtherNames = ()


_Decoded = TypeVar("_Decoded")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedCheckpoint:
    """What a record says.

    Attributes:
        record: The record's own name.
        directory: Where the checkpoint lies, as the record calls it.
        output: The output directory that it belongs to, if that is another one.
        handed_over: The checkpoint came from the destination, or an agent had it.
        recorded_ns: The record's mtime, by the clock that also stamps the checkpoint's files.
        ranks: The ranks whose share of the checkpoint is here; empty if the record does not say.
        files: The files of the save, relative to `path`; empty if the checkpoint is a single file.
        others: What the program has put beside them for the checkpoint.
        signature: Of the content that was compared with the record.
    """

    path: Path
    record: str
    directory: str
    output: str
    step: int
    save: str
    kind: Kind
    world_size: int
    saved_at: float
    recorded_ns: int
    handed_over: bool
    ranks: tuple[int, ...]
    files: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    signature: str = ""

    @property
    def belongs_to(self) -> str:
        return belongs_to(self.directory, self.output)


def unannounced(volume: Path, checkpoint_directory: Path, *, known: Collection[str]) -> Sequence[RecordedCheckpoint]:
    """Return those saved after the last one of their output directory that an agent had, the oldest first. Blocks.

    `known` are save ids that an agent had. A record is written when its checkpoint is complete and on disk, so matching
    sizes and times are proof enough. Older checkpoints were superseded.
    """
    try:
        with open_volume(volume) as root, root.folder(_FOLDER) as folder:
            found = list(_read_newest(folder, volume, checkpoint_directory))
            found.sort(key=lambda one: (one.saved_at, one.step))
            last = {
                one.belongs_to: position for position, one in enumerate(found) if one.handed_over or one.save in known
            }
            newer = [one for position, one in enumerate(found) if position > last.get(one.belongs_to, -1)]
            return _whole(root, folder, volume, newer)
    except OSError:
        return []


def is_any_handed_over(volume: Path, checkpoint_directory: Path) -> bool:
    """Return whether a record says that an agent or the destination has its checkpoint. Blocks."""
    try:
        with open_volume(volume) as root, root.folder(_FOLDER) as folder:
            return any(recorded.handed_over for recorded in _read_newest(folder, volume, checkpoint_directory))
    except OSError:
        return False


class RecordedPaths:
    """The paths of all checkpoints that have a record: a client announces them, or restore has fetched them.

    Reads a record again only if it has changed, because the list of its files may be long.
    """

    def __init__(self, volume: Path, checkpoint_directory: Path) -> None:
        self._volume = volume
        self._checkpoint_directory = checkpoint_directory
        self._read: dict[str, tuple[tuple[int, int], Path]] = {}

    def find(self) -> frozenset[Path]:
        """Return them. Blocks. An unreadable record still shows that something announces a checkpoint of its name."""
        found: dict[str, tuple[tuple[int, int], Path]] = {}
        with suppress(OSError), open_volume(self._volume) as root, root.folder(_FOLDER) as folder:
            for entry in folder.entries():
                if not entry.name.endswith(SUFFIX):
                    continue
                with suppress(FileNotFoundError):
                    status = folder.status_of(entry)
                    stamp = (status.st_mtime_ns, status.st_size)
                    known = self._read.get(entry.name)
                    is_known = known is not None and known[0] == stamp
                    found[entry.name] = known if is_known and known else (stamp, self._path(folder, entry.name))
        self._read = found
        return frozenset(path for _, path in found.values())

    def _path(self, folder: Folder, name: str) -> Path:
        try:
            return _read(folder, name, self._volume, self._checkpoint_directory).path
        except FileNotFoundError:
            raise
        except _UNREADABLE:
            # Of one in another directory, only the record itself says where.
            return self._checkpoint_directory / name.removesuffix(SUFFIX)


def _read_newest(folder: Folder, volume: Path, checkpoint_directory: Path) -> Iterator[RecordedCheckpoint]:
    """Yield the readable ones of the records that were written last."""
    stamped: list[tuple[int, str]] = []
    for entry in folder.entries():
        with suppress(OSError):
            if entry.name.endswith(SUFFIX):
                stamped.append((folder.status_of(entry).st_mtime_ns, entry.name))
    for _, name in heapq.nlargest(CLIENT_RECORDS, stamped):
        try:
            yield _read(folder, name, volume, checkpoint_directory)
        except FileNotFoundError:
            continue  # its checkpoint was just deleted
        except _UNREADABLE as error:
            _say_unreadable(name, error)


def _say_unreadable(name: str, error: Exception) -> None:
    log.warning(
        "unannounced.record_unreadable",
        record=name,
        error=str(error),
        hint="if its checkpoint was never announced, it is not uploaded",
    )


def _read(folder: Folder, name: str, volume: Path, checkpoint_directory: Path) -> RecordedCheckpoint:
    """Raises the errors in `_UNREADABLE`."""
    recorded_ns = folder.status(name).st_mtime_ns
    head = _decode(folder, name, _Head)
    try:
        check_token(head.name, "checkpoint name")
        check_token(head.save, "save id")
    except RequestError as error:
        raise ValueError(str(error)) from error
    if name != record_file(head.directory, head.name):
        raise ValueError(f"it names {head.name!r} in {head.directory or 'the checkpoint directory'}")
    if max(head.ranks, default=0) >= head.world_size:
        raise ValueError(f"it lists rank {max(head.ranks)}, but world_size is {head.world_size}")
    return RecordedCheckpoint(
        path=(volume / head.directory if head.directory else checkpoint_directory) / head.name,
        record=name,
        directory=head.directory,
        output=head.output,
        step=head.step,
        save=head.save,
        kind=head.kind,
        world_size=head.world_size,
        saved_at=head.saved_at,
        recorded_ns=recorded_ns,
        handed_over=head.committed or head.announced,
        ranks=tuple(dict.fromkeys(head.ranks)),
    )


def _decode(folder: Folder, name: str, as_type: type[_Decoded]) -> _Decoded:
    """Raises the errors in `_UNREADABLE`."""
    try:
        return msgspec.json.decode(folder.read(name, CLIENT_RECORD_BYTES), type=as_type)
    except RecursionError as error:
        raise ValueError(str(error)) from error


def _whole(root: Folder, folder: Folder, volume: Path, found: Sequence[RecordedCheckpoint]) -> list[RecordedCheckpoint]:
    """Return the checkpoints that are still what was recorded, with their signatures, in their order.

    Starts with the newest and stops when all together have more files than a rank may have, because it examines each.
    """
    whole: list[RecordedCheckpoint] = []
    left = FILES_PER_RANK
    for recorded in reversed(found):
        name = recorded.record
        try:
            listed = _decode(folder, name, _Files)
        except FileNotFoundError:
            continue
        except _UNREADABLE as error:
            _say_unreadable(name, error)
            continue
        left -= len(listed.files)
        if left < 0:
            log.warning("unannounced.too_many_files", record=name, hint="it is not uploaded, newer ones are")
            break
        # The signature comes before the comparison: another checkpoint of that name may take its place at any time.
        signed = _signed(volume, _with_files(recorded, listed))
        if _is_whole(root, volume, signed, listed.files):
            whole.append(signed)
    return whole[::-1]


def _with_files(recorded: RecordedCheckpoint, listed: _Files) -> RecordedCheckpoint:
    if not listed.files[0].path:
        return recorded  # a single file, which has no others
    return replace(recorded, files=tuple(file.path for file in listed.files), others=listed.others)


def _signed(volume: Path, recorded: RecordedCheckpoint) -> RecordedCheckpoint:
    try:
        return replace(recorded, signature=content_signature(volume, str(recorded.path), recorded.files))
    except KeepstepError:
        return recorded  # the comparison reports what is wrong


def _is_whole(root: Folder, volume: Path, recorded: RecordedCheckpoint, files: Sequence[_File]) -> bool:
    damage = next((reason for file in files if (reason := _damage(root, volume, recorded, file))), None)
    if damage is not None:
        log.warning(
            "unannounced.dropped",
            path=str(recorded.path),
            step=recorded.step,
            reason=damage,
            hint="the checkpoint was never announced and has changed since it was saved: it is not uploaded",
        )
    return damage is None


def _damage(root: Folder, volume: Path, recorded: RecordedCheckpoint, file: _File) -> str | None:
    """Return why a file is not what was recorded, or None.

    It may be missing, have another size, or have been written to later, as when a framework uses a path again.
    """
    try:
        found = resolve_path(volume, f"{recorded.path}/{file.path}".rstrip("/"))
        status = root.status(found)
    except OSError as error:
        return f"{file.path}: {error.strerror}"
    except KeepstepError as error:
        return f"{file.path}: {error}"
    if status.st_size != file.size:
        return f"{file.path} has {status.st_size} bytes instead of {file.size}"
    if status.st_mtime_ns > recorded.recorded_ns:
        return f"{file.path} was written to after it was recorded"
    return None

"""Pinned checkpoints below `<volume>/.mooring/staged`: what keeps a file's bytes when the trainer rotates its own copy.

<save>/rank-00003/<path>     the pins
<save>/rank-00003.json       the request's descriptor and the pinned files; written last: its presence means staged

Owns that folder alone. Knows nothing of uploads or of what is in a descriptor. Invariants: nothing outside the volume
and nothing of `.mooring` is ever pinned; files and names are on disk before the descriptor is; a stage that fails
leaves nothing behind, one that is killed leaves a folder without a descriptor, which `scan` removes; two ranks never
stage different bytes under one path of a save; what is written to a pinned file later shows in its fingerprint. Empty
folders are not part of a checkpoint. The same save and rank are staged by one thread at a time.
"""

import errno
import filecmp
import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any, Final

import structlog

from mooring_agent.adapters.folders import make_folder
from mooring_agent.adapters.volume.content_signature import content_signature
from mooring_agent.adapters.volume.durable_files import PARTIAL_SUFFIX, partial_of, sync_folder, write_durably
from mooring_agent.adapters.volume.errors import volume_error
from mooring_agent.adapters.volume.pinning import Pinner
from mooring_agent.adapters.volume.reserve import Reserve
from mooring_agent.adapters.volume.source_walk import resolve_source, resolve_sources
from mooring_agent.core.commit import DIFFERENT_FILES_HINT
from mooring_agent.core.errors import ErrorKind, RequestError, VolumeError
from mooring_agent.core.model import Fingerprint, StagedFile
from mooring_agent.core.object_layout import check_token
from mooring_agent.ports import StageRequest
from mooring_api.names import STAGED_DIRECTORY, STATE_DIRECTORY

_FORMAT_VERSION: Final = 1
# The longest that a kernel is built with is 10 ms.
_TICK_SECONDS: Final = 0.02
# A filesystem commits its own journal once for all that wait together: this many wait.
_SYNC_THREADS: Final = 16
# A turn of a thread costs as much as a file; many turns even out what is large and what is small.
_SYNC_TURNS: Final = 16

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


class LocalStagingArea:
    """`ports.StagingArea` on a local filesystem."""

    def __init__(self, volume: Path) -> None:
        self._volume = volume.resolve()
        self._root = self._volume / STATE_DIRECTORY / STAGED_DIRECTORY
        self._pinner = Pinner(self._volume)
        self._reserve = Reserve(self._volume / STATE_DIRECTORY)

    def stage(self, request: StageRequest) -> tuple[StagedFile, ...]:
        try:
            files = self._stage(request)
        except VolumeError as error:
            # Pins are links: a few blocks are enough for them, and this may be the last save of all.
            if error.kind is not ErrorKind.DISK_FULL or not self._reserve.spend():
                raise
            files = self._stage(request)
        self._refuse_other_bytes(request, files)
        return files

    def _stage(self, request: StageRequest) -> tuple[StagedFile, ...]:
        folder = self._save_folder(request.save) / f"rank-{request.rank:05d}"
        descriptor = _descriptor_of(folder)
        if descriptor.exists():
            try:
                return self._read(descriptor)[1]
            except (OSError, ValueError, KeyError, TypeError) as error:
                _log.warning("staged_descriptor_unreadable", path=str(descriptor), reason=str(error))
                descriptor.unlink(missing_ok=True)
        sources = resolve_sources(self._volume, request.source, request.files)
        announced = str(resolve_source(self._volume, request.source))
        try:
            # What a killed stage left; without a descriptor it is nobody's.
            _remove_tree(folder)
            folders = self._make_folders(folder, sources)
            private = [
                self._pinner.pin(source, f"{folder}/{path}", private=_is_rewritten(request, source))
                for path, source in sources.items()
            ]
            with ThreadPoolExecutor(_SYNC_THREADS, "stage") as threads:
                synced = threads.map(_sync_files, _turns([f"{folder}/{path}" for path in sources]))
                fingerprints = list(chain.from_iterable(synced))
                for _ in threads.map(sync_folder, folders):
                    pass
            pins = folder.relative_to(self._volume).as_posix()
            files = tuple(
                StagedFile(
                    path=path,
                    pin=f"{pins}/{path}",
                    fingerprint=fingerprint,
                    private=is_private,
                    announced=source == announced,
                )
                for (path, source), is_private, fingerprint in zip(sources.items(), private, fingerprints, strict=True)
            )
            _let_a_tick_pass(files)
            # Files that were named one by one are judged one by one: others in the folder may change.
            if (
                request.signature
                and not request.files
                and content_signature(self._volume, request.source) != request.signature
            ):
                raise VolumeError(
                    ErrorKind.FILE_CHANGED,
                    f"{request.source} was written to while it was being staged",
                    hint="announce a checkpoint after its last file is written, and do not write to it again",
                )
            write_durably(descriptor, _encode(request, files))
        except OSError as error:
            self._undo(folder)
            raise volume_error(error, f"cannot stage {request.source}") from error
        except BaseException:
            self._undo(folder)
            raise
        return files

    def _refuse_other_bytes(self, request: StageRequest, files: Sequence[StagedFile]) -> None:
        """No other rank of the save has another file under a path of these: both would go to the same key.

        After our descriptor is there: of two ranks that are staged at once, one at least sees the other's.
        """
        folder = self._save_folder(request.save) / f"rank-{request.rank:05d}"
        try:
            for descriptor in sorted(folder.parent.glob("rank-*.json")):
                other = descriptor.with_suffix("")
                for file in files if other != folder else ():
                    if _differ(folder / file.path, other / file.path):
                        _descriptor_of(folder).unlink()
                        self._undo(folder)
                        raise RequestError(
                            ErrorKind.CONTRADICTION,
                            f"ranks {int(other.name.removeprefix('rank-'))} and {request.rank} of save {request.save} "
                            f"have different bytes for {file.path}",
                            hint=DIFFERENT_FILES_HINT,
                        )
        except OSError as error:
            raise volume_error(error, f"cannot compare the ranks of save {request.save}") from error

    def check(self, save: str, rank: int, files: Sequence[StagedFile]) -> None:
        for file in files:
            path = self._volume / file.pin
            try:
                found = _fingerprint(path.lstat())
            except OSError as error:
                raise volume_error(error, f"pinned file of save {save}, rank {rank}, {path}") from error
            if found != file.fingerprint:
                raise VolumeError(
                    ErrorKind.FILE_CHANGED,
                    f"{file.path} of save {save}, rank {rank}, was rewritten in place after it was announced",
                    hint="write checkpoints to new files (a new name, or a temporary file and a rename)",
                )

    def release(self, save: str) -> None:
        folder = self._save_folder(save)
        try:
            descriptors = list(folder.glob("rank-*.json"))
            for descriptor in descriptors:
                descriptor.unlink(missing_ok=True)
            if descriptors:
                # Descriptors go first, durably: a release that is cut short reads as a stage that was.
                sync_folder(folder)
            _remove_tree(folder)
        except OSError as error:
            raise volume_error(error, f"cannot release {folder}") from error

    def scan(self) -> Iterable[tuple[Mapping[str, object], tuple[StagedFile, ...]]]:
        """As the port says; besides, removes what a killed stage left. Only before the first `stage`."""
        found = []
        try:
            saves = sorted(self._root.iterdir()) if self._root.exists() else []
            for save in saves:
                for entry in sorted(save.iterdir()) if save.is_dir() else []:
                    if entry.name.endswith(PARTIAL_SUFFIX):
                        entry.unlink()
                    elif entry.is_dir() and not _descriptor_of(entry).exists():
                        _log.info("half_staged_removed", path=str(entry))
                        _remove_tree(entry)
                    elif entry.suffix == ".json":
                        try:
                            found.append(self._read(entry))
                        except (OSError, ValueError, KeyError, TypeError) as error:
                            _log.error("staged_descriptor_unreadable", path=str(entry), reason=str(error))
                _remove_if_empty(save)
        except OSError as error:
            raise volume_error(error, f"cannot scan {self._root}") from error
        return found

    def _save_folder(self, save: str) -> Path:
        return self._root / check_token(save, "save id")

    def _make_folders(self, folder: Path, sources: Mapping[str, str]) -> list[Path]:
        """Make every folder the pins need; returns those whose entries must reach the disk."""
        leaves = {path.rpartition("/")[0] for path in sources}
        needed = {folder}
        for leaf in leaves:
            parts = leaf.split("/")
            needed.update(folder.joinpath(*parts[:depth]) for depth in range(1, len(parts) + 1))
        for needed_folder in sorted(needed):
            # Another rank of the save, whose stage failed, may find its folder empty just then.
            make_folder(needed_folder)
        return [*needed, folder.parent, self._root, self._root.parent, self._volume]

    def _undo(self, folder: Path) -> None:
        try:
            _remove_tree(folder)
            partial_of(_descriptor_of(folder)).unlink(missing_ok=True)
            _remove_if_empty(folder.parent)
        except OSError as error:
            _log.error("half_staged_kept", path=str(folder), reason=str(error))

    def _read(self, descriptor: Path) -> tuple[Mapping[str, object], tuple[StagedFile, ...]]:
        value: Any = json.loads(descriptor.read_bytes())
        if value["format"] != _FORMAT_VERSION:
            raise ValueError(f"format {value['format']!r} is not known here")
        content: Any = value["descriptor"]
        if not isinstance(content, dict):
            raise TypeError("the descriptor is not a JSON object")
        folder = descriptor.with_suffix("").relative_to(self._volume)
        return content, tuple(
            StagedFile(
                path=str(file["path"]),
                pin=(folder / str(file["path"])).as_posix(),
                fingerprint=Fingerprint(
                    size_bytes=int(file["size"]), mtime_ns=int(file["mtime_ns"]), inode=int(file["inode"])
                ),
                private=bool(file["private"]),
                announced=bool(file["announced"]),
            )
            for file in value["files"]
        )


def _is_rewritten(request: StageRequest, source: str) -> bool:
    """Whether its trainer will write to that very inode again."""
    return request.private or (bool(request.rewritten_inodes) and os.lstat(source).st_ino in request.rewritten_inodes)


def _let_a_tick_pass(files: Sequence[StagedFile]) -> None:
    """Kernels stamp files by a clock that ticks: what is written from here on must not look like what was pinned."""
    newest_ns = max((file.fingerprint.mtime_ns for file in files if not file.private), default=0)
    age_seconds = (time.time_ns() - newest_ns) / 1e9
    if 0 <= age_seconds < _TICK_SECONDS:
        time.sleep(_TICK_SECONDS - age_seconds)


def _encode(request: StageRequest, files: Sequence[StagedFile]) -> bytes:
    return json.dumps(
        {
            "format": _FORMAT_VERSION,
            "descriptor": dict(request.descriptor),
            "files": [
                {
                    "path": file.path,
                    "size": file.fingerprint.size_bytes,
                    "mtime_ns": file.fingerprint.mtime_ns,
                    "inode": file.fingerprint.inode,
                    "private": file.private,
                    "announced": file.announced,
                }
                for file in files
            ],
        },
        ensure_ascii=False,
    ).encode()


def _descriptor_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.json")


def _turns(paths: Sequence[str]) -> Iterator[Sequence[str]]:
    """All of them, in order, as many as one thread takes at a time."""
    count = -(-len(paths) // (_SYNC_THREADS * _SYNC_TURNS))
    return (paths[begin : begin + count] for begin in range(0, len(paths), count))


def _sync_files(paths: Sequence[str]) -> list[Fingerprint]:
    """Make pins durable; returns what they are, which is what was made durable."""
    found = []
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
            found.append(_fingerprint(os.fstat(descriptor)))
        finally:
            os.close(descriptor)
    return found


def _differ(pin: Path, other: Path) -> bool:
    """Whether they cannot both be in one folder. Reads only what has one size and not the same inode."""
    try:
        return not other.samefile(pin) and not filecmp.cmp(pin, other, shallow=False)
    except FileNotFoundError:
        return False
    except NotADirectoryError:
        return True


def _fingerprint(status: os.stat_result) -> Fingerprint:
    return Fingerprint(size_bytes=status.st_size, mtime_ns=status.st_mtime_ns, inode=status.st_ino)


def _remove_tree(folder: Path) -> None:
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        if folder.exists():
            raise


def _remove_if_empty(folder: Path) -> None:
    if not folder.exists():
        return
    try:
        folder.rmdir()
    except OSError as error:
        if error.errno not in {errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT, errno.ENOTDIR}:
            raise

"""Pins checkpoints below `<volume>/.keepstep/staged`, so that a file's bytes stay when the trainer deletes its copy.

<save>/rank-00003/<path>     the pins
<save>/rank-00003.json       the request's descriptor and the pinned files; written last: its presence means staged

Owns that folder alone. Knows nothing of uploads or of what is in a descriptor. Empty folders are not part of a
checkpoint. Only one thread at a time stages the same save and rank. Invariants:

- Nothing outside the volume and nothing of `.keepstep` is ever pinned.
- Files and names are on disk before the descriptor is.
- A stage that fails leaves nothing behind. One that is killed leaves a folder without a descriptor, which `scan`
  removes.
- Two ranks never stage different bytes under one path of a save.
- A later write to a pinned file shows in its fingerprint.
- The program's own files, the others of a request, never fail a stage: one that cannot be copied is left out.

The trainer can write a descriptor, just as it can announce. A descriptor only says which files of its own folder are
the pins; nothing in it leads anywhere else.
"""

import os
import re
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, groupby, repeat
from pathlib import Path
from typing import Final

import structlog

from keepstep_agent.adapters.output.output_directories import OutputDirectories
from keepstep_agent.adapters.volume.announced_files import AnnouncedFiles, resolve_files, resolve_path
from keepstep_agent.adapters.volume.content_check import check_sent, content_signature, rewritten_in_place
from keepstep_agent.adapters.volume.disk import Reserve
from keepstep_agent.adapters.volume.errors import volume_error
from keepstep_agent.adapters.volume.memory_room import ManifestShare, MemoryRoom
from keepstep_agent.adapters.volume.other_files import OtherFiles
from keepstep_agent.adapters.volume.pinning import Pinner, encode_descriptor, let_a_tick_pass, read_descriptor
from keepstep_agent.adapters.volume.shared_volume import (
    PARTIAL_SUFFIX,
    Folder,
    fingerprint,
    open_volume,
)
from keepstep_agent.adapters.volume.syncing import folder_of, sync_files, sync_folders
from keepstep_agent.core.errors import ErrorKind, KeepstepError, RequestError, VolumeError
from keepstep_agent.core.file_lists import PathList, StagedFiles, staged_files
from keepstep_agent.core.limits import FILES_PER_RANK
from keepstep_agent.core.model import RankManifest, SourceFile, StagedFile
from keepstep_agent.core.stored.commit import DIFFERENT_FILES_HINT
from keepstep_agent.core.stored.manifest import expected_manifest_bytes
from keepstep_agent.core.stored.object_layout import check_token
from keepstep_agent.ports import StagedDescriptor, StageRequest
from keepstep_api.names import STAGED_DIRECTORY, STATE_DIRECTORY

_ROOT: Final = f"{STATE_DIRECTORY}/{STAGED_DIRECTORY}"
_DESCRIPTOR: Final = re.compile(r"(rank-\d{5,10})\.json")
_COMPARED_BYTES: Final = 1024 * 1024
_TOO_MUCH: Final = frozenset({ErrorKind.DISK_FULL, ErrorKind.BAD_REQUEST})
"""Errors of a stage that the copies of the others may have caused: the volume is full, or a limit is exceeded."""

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


class LocalStagingArea:
    """`ports.StagingArea` on a local filesystem."""

    def __init__(self, volume: Path, watched: Sequence[str] = ()) -> None:
        """`watched`: the output directories whose files `StageRequest.sources` names."""
        self._volume = volume
        self._output = OutputDirectories(volume, watched)
        self._pinner = Pinner(volume)
        self._others = OtherFiles(volume, self._pinner)
        self._reserve = Reserve(volume)
        self._room = MemoryRoom()

    def make_durable(self, path: str, files: Sequence[str]) -> None:
        try:
            announced = resolve_files(self._volume, path, files)
            self._room.check_alone(_share_of(announced.paths, len(announced)), path)
        except KeepstepError:
            return  # staging reports what is wrong
        found = announced.sources
        folders = {folder_of(file) for file in found}
        # Their parents hold the names of the folders themselves.
        folders |= {folder_of(folder) for folder in folders}
        try:
            with open_volume(self._volume) as root:
                deque(sync_files(self._volume, found), maxlen=0)
                sync_folders(root, sorted(folders))
        except FileNotFoundError:
            return  # as above
        except OSError as error:
            raise volume_error(error, f"cannot make {path} durable") from error

    def stage(self, request: StageRequest) -> StagedFiles:
        left_out: dict[str, str] = {}
        if request.sources is not None:
            return self._stage(request, left_out)
        try:
            files = self._stage_with_reserve(request, left_out)
        except KeepstepError as error:
            if not request.others or error.kind not in _TOO_MUCH:
                raise
            left_out = dict.fromkeys(request.others, str(error))
            files = self._stage_with_reserve(replace(request, others=()), {})
        if left_out:
            path, reason = next(iter(left_out.items()))
            _log.warning(
                "staging.others_left_out",
                save=request.save,
                rank=request.rank,
                count=len(left_out),
                first=path,
                reason=reason,
                hint="the checkpoint is stored without these files of the program's own",
            )
        self._refuse_other_bytes(request, files)
        return files

    def _stage_with_reserve(self, request: StageRequest, left_out: dict[str, str]) -> StagedFiles:
        try:
            return self._stage(request, left_out)
        except VolumeError as error:
            # Pins are links, which need only a few blocks, and this may be the run's last save.
            if request.others or error.kind is not ErrorKind.DISK_FULL or not self._reserve.spend():
                raise
        return self._stage(request, left_out)

    def _stage(self, request: StageRequest, left_out: dict[str, str]) -> StagedFiles:
        """As `stage`. `left_out` gets each of the others that was not copied, with the reason."""
        save = _save_folder(request.save)
        folder = f"{save}/rank-{request.rank:05d}"
        try:
            with open_volume(self._volume) as root:
                staged = self._staged_before(root, folder)
                if staged is not None:
                    self._room.note(folder, _share_of(staged.paths, len(staged)))
                    return staged
                if request.sources is not None:
                    named = chain(request.kept, (file.path for file in request.sources))
                    share = _share_of(named, len(request.kept) + len(request.sources), is_snapshot=True)
                    self._room.take(folder, share, request.path)
                    return self._stage_sources(root, folder, request.sources, request.descriptor)
                sources = resolve_files(self._volume, request.path, request.files)
                self._room.take(folder, _share_of(sources.paths, len(sources)), request.path)
                try:
                    announced = resolve_path(self._volume, request.path)
                    files = self._pin_all(root, folder, sources, announced, request, left_out)
                    if request.signatures and (
                        content_signature(self._volume, request.path, request.files) not in request.signatures
                    ):
                        raise VolumeError(
                            ErrorKind.FILE_CHANGED,
                            f"{request.path} was written to after it was announced",
                            hint="announce a checkpoint after its last file is written, and do not write to it again",
                        )
                    root.write_durably(f"{folder}.json", encode_descriptor(request.descriptor, files))
                except BaseException:
                    self._undo(root, folder)
                    raise
        except OSError as error:
            raise volume_error(error, f"cannot stage {request.path}") from error
        return files

    def _stage_sources(
        self, root: Folder, folder: str, sources: Sequence[SourceFile], descriptor: StagedDescriptor
    ) -> StagedFiles:
        """Pin files of the output directories. A snapshot that only leaves files out has none.

        A file that was deleted or written to since it was looked at is left out, with its group.
        """
        if not sources:
            return staged_files(())
        try:
            root.remove(folder)
            folders = _make_folders(root, folder, (file.path for file in sources))
            positions, private, changed = self._pin_sources(root, folder, sources)
            if not positions:
                raise next(iter(changed.values()))
            synced = self._synced(folder, PathList(sources[position].path for position in positions), private)

            def compared() -> Iterator[StagedFile]:
                for file, position in zip(synced, positions, strict=True):
                    if not file.private and file.fingerprint != sources[position].fingerprint:
                        changed[file.path] = rewritten_in_place(file.path)
                    yield file

            pinned = staged_files(compared())
            sync_folders(root, folders)
            if changed:
                groups = {file.group for file in sources if file.path in changed} - {None}
                left_out = {file.path for file in sources if file.path in changed or file.group in groups}
                synced_files, pinned = pinned, staged_files(file for file in pinned if file.path not in left_out)
                if not pinned:
                    raise next(iter(changed.values()))
                for file in synced_files:
                    if file.path in left_out:
                        root.unlink(file.pin)
                _log.info("snapshot.files_changed", count=len(left_out), first=min(left_out))
            let_a_tick_pass(_newest_link_ns(pinned))
            root.write_durably(f"{folder}.json", encode_descriptor(descriptor, pinned))
        except BaseException:
            self._undo(root, folder)
            raise
        return pinned

    def _pin_sources(
        self, root: Folder, folder: str, sources: Sequence[SourceFile]
    ) -> tuple["array[int]", bytearray, dict[str, VolumeError]]:
        """Pin what is as it was looked at.

        Return the positions of what is pinned, whether each pin has its own inode, and why others are missing.
        """
        positions, private = array("I"), bytearray()
        changed: dict[str, VolumeError] = {}
        for above, together in groupby(enumerate(sources), key=lambda one: folder_of(one[1].path)):
            try:
                source = self._output.folder(above)
            except OSError as error:
                changed |= {file.path: volume_error(error, f"cannot open {file.path}") for _, file in together}
                continue
            with source, root.folder(f"{folder}/{above}") as target:
                for position, file in together:
                    try:
                        private.append(self._pinner.pin_source(source, file, target))
                        positions.append(position)
                    except VolumeError as error:
                        if error.kind is ErrorKind.DISK_FULL:
                            raise
                        target.unlink(file.path.rpartition("/")[2])
                        changed[file.path] = error
        return positions, private, changed

    def _staged_before(self, root: Folder, folder: str) -> StagedFiles | None:
        try:
            return read_descriptor(root, folder)[1]
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            _log.warning("staging.descriptor_unreadable", path=f"{folder}.json", reason=str(error))
            root.remove(f"{folder}.json")
            return None

    def _pin_all(
        self,
        root: Folder,
        folder: str,
        sources: AnnouncedFiles,
        announced: str,
        request: StageRequest,
        left_out: dict[str, str],
    ) -> StagedFiles:
        # Remove what a killed stage left: without a descriptor it is not staged.
        root.remove(folder)
        folders = _make_folders(root, folder, sources.paths)
        private = bytes(self._pin_each(root, folder, sources, request))
        copies = list(self._others.copy(root, folder, request, FILES_PER_RANK - len(sources), left_out))
        if copies:
            folders = list(dict.fromkeys([*folders, *_make_folders(root, folder, copies)]))
        is_one_file = len(sources) == 1 and sources.source(sources.paths[0]) == announced
        files = staged_files(
            chain(
                self._synced(folder, sources.paths, private, announced=sources.paths[0] if is_one_file else ""),
                self._synced(folder, PathList(copies), repeat(True, len(copies))),
            )
        )
        sync_folders(root, folders)
        let_a_tick_pass(_newest_link_ns(files))
        return files

    def _synced(
        self, folder: str, paths: PathList, private: Iterable[bool | int], announced: str = ""
    ) -> Iterator[StagedFile]:
        """Make pins in a folder durable, and yield what was pinned. `announced` is the checkpoint itself."""
        synced = sync_files(self._volume, paths.below(folder))
        for path, is_private, (pinned, changed_ns) in zip(paths, private, synced, strict=True):
            yield StagedFile(
                path=path,
                pin=f"{folder}/{path}",
                fingerprint=pinned,
                private=bool(is_private),
                announced=path == announced,
                changed_ns=changed_ns,
            )

    def _pin_each(self, root: Folder, folder: str, sources: AnnouncedFiles, request: StageRequest) -> Iterator[bool]:
        """Pin each file, in order, and yield whether the pin has its own inode.

        Neighbouring files of one folder share one opening of it.
        """

        def folders_of(item: tuple[str, str]) -> tuple[str, str]:
            return folder_of(item[0]), folder_of(item[1])

        for (above, source_above), together in groupby(sources, key=folders_of):
            with root.folder(source_above) as source, root.folder(f"{folder}/{above}".rstrip("/")) as target:
                for path, found in together:
                    name = found.rpartition("/")[2]
                    private = request.private or (
                        # The trainer will write to that inode again.
                        bool(request.rewritten_inodes) and source.status(name).st_ino in request.rewritten_inodes
                    )
                    yield self._pinner.pin(source, name, target, path.rpartition("/")[2], private=private)

    def _refuse_other_bytes(self, request: StageRequest, files: StagedFiles) -> None:
        """Raise CONTRADICTION if another rank of the save has different bytes under one of these paths.

        Both would go to the same key. Call it after writing this rank's descriptor: then of two ranks that are staged
        at once, at least one sees the other's.
        """
        save = _save_folder(request.save)
        own = f"rank-{request.rank:05d}"
        try:
            with open_volume(self._volume) as root:
                with root.folder(save) as folder:
                    others = [match[1] for entry in folder.entries() if (match := _DESCRIPTOR.fullmatch(entry.name))]
                for other in others:
                    for file in files if other != own else ():
                        if _differ(root, f"{save}/{own}/{file.path}", f"{save}/{other}/{file.path}"):
                            root.unlink(f"{save}/{own}.json")
                            self._undo(root, f"{save}/{own}")
                            raise RequestError(
                                ErrorKind.CONTRADICTION,
                                f"ranks {int(other.removeprefix('rank-'))} and {request.rank} of save {request.save} "
                                f"have different bytes for {file.path}",
                                hint=DIFFERENT_FILES_HINT,
                            )
        except OSError as error:
            raise volume_error(error, f"cannot compare the ranks of save {request.save}") from error

    def check(self, save: str, rank: int, files: StagedFiles) -> None:
        what = f"pinned file of save {save}, rank {rank}"
        try:
            with open_volume(self._volume) as root:
                for above, together in groupby(files, key=lambda file: folder_of(file.pin)):
                    with root.folder(above) as folder:
                        for file in together:
                            what = f"{file.path} of save {save}, rank {rank}"
                            if fingerprint(folder.status(file.pin.rpartition("/")[2])) != file.fingerprint:
                                raise rewritten_in_place(what)
        except OSError as error:
            raise volume_error(error, what) from error

    def check_sent(self, manifest: RankManifest, files: StagedFiles, *, may_read: Callable[[], bool]) -> None:
        check_sent(self._volume, manifest, files, may_read)

    def release(self, save: str) -> None:
        folder = _save_folder(save)
        try:
            with open_volume(self._volume) as root:
                try:
                    with root.folder(folder) as opened:
                        descriptors = [entry.name for entry in opened.entries() if _DESCRIPTOR.fullmatch(entry.name)]
                        for name in descriptors:
                            opened.remove(name)
                        if descriptors:
                            # Descriptors go first, durably: an interrupted release then looks like a killed stage.
                            opened.sync()
                except FileNotFoundError:
                    return
                root.remove(folder)
        except OSError as error:
            raise volume_error(error, f"cannot release {folder}") from error
        finally:
            self._room.give_back(folder)

    def scan(self, may_read: Callable[[str], bool] = lambda _: True) -> Iterable[tuple[StagedDescriptor, StagedFiles]]:
        """See `ports.StagingArea.scan`. It also removes what a killed stage left. Call it before the first `stage`."""
        found: list[tuple[StagedDescriptor, StagedFiles]] = []
        try:
            with open_volume(self._volume) as root:
                try:
                    staged = root.folder(_ROOT)
                except FileNotFoundError:
                    return found
                with staged:
                    for entry in staged.entries():
                        if entry.is_dir(follow_symlinks=False) and may_read(entry.name):
                            found += self._scan_save(root, f"{_ROOT}/{entry.name}")
                            staged.remove_if_empty(entry.name)
        except OSError as error:
            raise volume_error(error, f"cannot scan {self._volume}/{_ROOT}") from error
        return found

    def _scan_save(self, root: Folder, save: str) -> Iterator[tuple[StagedDescriptor, StagedFiles]]:
        with root.folder(save) as folder:
            names = [entry.name for entry in folder.entries()]
            for name in names:
                if name.endswith(PARTIAL_SUFFIX):
                    folder.remove(name)
                elif name.endswith(".json"):
                    pins = f"{save}/{name.removesuffix('.json')}"
                    try:
                        described, files = read_descriptor(root, pins)
                        self._room.note(pins, _share_of(files.paths, len(files)))
                        yield described, files
                    except (OSError, ValueError) as error:
                        _log.error("staging.descriptor_unreadable", path=f"{save}/{name}", reason=str(error))
                elif f"{name}.json" not in names:
                    _log.info("staging.leftover_removed", path=f"{save}/{name}")
                    folder.remove(name)

    def _undo(self, root: Folder, folder: str) -> None:
        self._room.give_back(folder)
        try:
            root.remove(folder)
            root.unlink(f"{folder}.json{PARTIAL_SUFFIX}")
            root.remove_if_empty(folder.rpartition("/")[0])
        except FileNotFoundError:
            pass  # nothing had been made
        except OSError as error:
            _log.error("staging.leftover_kept", path=folder, reason=str(error))


def _share_of(paths: Iterable[str], count: int, *, is_snapshot: bool = False) -> ManifestShare:
    size_bytes = expected_manifest_bytes(paths, is_snapshot=is_snapshot)
    return ManifestShare(files=count, size_bytes=size_bytes, is_snapshot=is_snapshot)


def _save_folder(save: str) -> str:
    return f"{_ROOT}/{check_token(save, 'save id')}"


def _make_folders(root: Folder, folder: str, sources: Iterable[str]) -> list[str]:
    """Make every folder that the pins need. Return the folders whose entries must reach the disk."""
    needed = {folder}
    for leaf in {path.rpartition("/")[0] for path in sources}:
        names = leaf.split("/") if leaf else []
        needed.update("/".join((folder, *names[:depth])) for depth in range(1, len(names) + 1))
    for path in sorted(needed):
        # Another rank whose stage failed may remove the save's empty folder meanwhile: `make_folder` then retries.
        root.make_folder(path).close()
    return [*needed, folder.rpartition("/")[0], _ROOT, STATE_DIRECTORY, ""]


def _newest_link_ns(files: StagedFiles) -> int:
    """Return the newest mtime of the files that share their inode with the trainer's."""
    times = zip(files.mtimes_ns, files.private, strict=True)
    return max((mtime_ns for mtime_ns, private in times if not private), default=0)


def _differ(root: Folder, pin: str, other: str) -> bool:
    """Whether the two cannot both be in one folder. Reads them only if sizes are equal and inodes differ."""
    try:
        second = root.open_file(other)
    except FileNotFoundError:
        return False
    except OSError:
        # One has a folder where the other has a file.
        return True
    try:
        with root.opened_file(pin) as first:
            one, two = os.fstat(first), os.fstat(second)
            if one.st_ino == two.st_ino:
                return False
            return one.st_size != two.st_size or not _same_bytes(first, second, one.st_size)
    finally:
        os.close(second)


def _same_bytes(first: int, second: int, size_bytes: int) -> bool:
    return all(
        os.pread(first, _COMPARED_BYTES, position) == os.pread(second, _COMPARED_BYTES, position)
        for position in range(0, size_bytes, _COMPARED_BYTES)
    )

"""Copies the program's own files, the others of a request, beside the pins of a save.

The program may write to them at any moment, so none of them is ever a reason for a stage to fail: one that cannot be
copied is left out. Invariants: a copy has what the file held between two writes of the program, and of a file that is
left out no copy stays. Only a full disk is raised: the caller then stages without the others.
"""

import errno
from collections.abc import Iterator
from pathlib import Path

from keepstep_agent.adapters.volume.announced_files import resolve_files
from keepstep_agent.adapters.volume.errors import volume_error
from keepstep_agent.adapters.volume.pinning import Pinner, let_a_tick_pass
from keepstep_agent.adapters.volume.shared_volume import Folder
from keepstep_agent.adapters.volume.syncing import folder_of
from keepstep_agent.core.errors import ErrorKind, KeepstepError
from keepstep_agent.ports import StageRequest


class OtherFiles:
    """Copies files of one volume. Methods block."""

    def __init__(self, volume: Path, pinner: Pinner) -> None:
        self._volume = volume
        self._pinner = pinner

    def copy(
        self, root: Folder, folder: str, request: StageRequest, limit: int, left_out: dict[str, str]
    ) -> Iterator[str]:
        """Copy the others of a request into `folder`, at most `limit` of them, and yield the path of each copy.

        `left_out` gets those that are not copied, each with the reason. Raises DISK_FULL alone.
        """
        for number, path in enumerate(request.others):
            if number >= limit:
                left_out[path] = "the checkpoint would have too many files"
                continue
            try:
                self._copy(root, folder, request.path, path)
            except KeepstepError as error:
                if error.kind is ErrorKind.DISK_FULL:
                    raise
                left_out[path] = str(error)
            else:
                yield path

    def _copy(self, root: Folder, folder: str, announced: str, path: str) -> None:
        found = resolve_files(self._volume, announced, (path,)).source(path)
        try:
            with (
                root.folder(folder_of(found)) as source,
                root.make_folder(f"{folder}/{folder_of(path)}".rstrip("/")) as target,
            ):
                name, target_name = found.rpartition("/")[2], path.rpartition("/")[2]
                if target.exists(target_name):
                    raise FileExistsError(errno.EEXIST, "another file of the checkpoint has this name")
                # Only then does every write during the copy show in the mtime.
                let_a_tick_pass(source.status(name).st_mtime_ns)
                try:
                    self._pinner.pin(source, name, target, target_name, private=True)
                except BaseException:
                    target.unlink(target_name)
                    raise
        except OSError as error:
            raise volume_error(error, f"cannot copy {path}") from error

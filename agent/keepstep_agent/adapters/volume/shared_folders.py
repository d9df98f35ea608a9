"""Makes the folders that trainer and agent both write into, and Keepstep's own folder `.keepstep`.

Every user who may write the volume may write the shared folders. Either process may make them first, and the usual
umask would keep out a trainer of another user, although kubelet made the volume for every user of the pod. No folder
gets wider permissions than the volume, and no folder of another process is changed. `.keepstep` itself is not shared:
only its owner may replace what else is in it, above all the socket.
"""

import contextlib
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from keepstep_agent.adapters.volume.announced_files import resolve_path
from keepstep_agent.adapters.volume.own_entries import (
    IN_OWN_FOLDER,
    IN_STATE_DIRECTORY,
    ON_THE_VOLUME,
    move_aside_wrong_kinds,
)
from keepstep_agent.adapters.volume.shared_volume import Folder, open_volume, path_in
from keepstep_agent.core.errors import ErrorKind, KeepstepError, VolumeError
from keepstep_api.names import RANKS_DIRECTORY, RECORDS_DIRECTORY, SAVING_DIRECTORY, STATE_DIRECTORY

VOLUME_MODE: Final = 0o755
"""Of a volume that Keepstep makes: who may rename its entries could replace `.keepstep`, whatever the umask."""
_OTHERS_WRITE: Final = 0o022
_OWN_MODE: Final = 0o755
_ALONE_MODE: Final = 0o700
_SHARED_BITS: Final = 0o077


def make_own_folder(root: Folder) -> Folder:
    """Make `.keepstep`, writable by its owner only. Narrows a mode left by an earlier version or a wide umask.

    What has its name, or one of Keepstep's own names in it, and is of the wrong kind is moved aside.
    """
    move_aside_wrong_kinds(root, ON_THE_VOLUME)
    folder = root.make_folder(STATE_DIRECTORY, _OWN_MODE)
    status = os.fstat(folder.descriptor)
    if status.st_uid == os.geteuid() and status.st_mode & _OTHERS_WRITE:
        # Some filesystems have one mode for all files.
        with contextlib.suppress(OSError):
            os.fchmod(folder.descriptor, stat.S_IMODE(status.st_mode) & ~_OTHERS_WRITE)
    move_aside_wrong_kinds(folder, IN_OWN_FOLDER)
    return folder


def limit_own_folder(volume: Path, *, to_owner: bool) -> None:
    """Let only its owner into `.keepstep`, or everybody again. Blocks; raises OSError.

    Others stay where they may write the volume: they could replace the folder, and one of them may be the trainer.
    """
    with open_volume(volume) as root, make_own_folder(root) as folder:
        is_open = os.fstat(root.descriptor).st_mode & _OTHERS_WRITE
        # Some filesystems have one mode for all files.
        with contextlib.suppress(OSError):
            os.fchmod(folder.descriptor, _ALONE_MODE if to_owner and not is_open else _OWN_MODE)


def make_shared_folders(volume: Path, checkpoint_directory: Path) -> None:
    """Make the missing folders. Blocks. Raises nothing: the code that needs a folder reports what is wrong with it."""
    shared = [f"{STATE_DIRECTORY}/{name}" for name in (RECORDS_DIRECTORY, RANKS_DIRECTORY, SAVING_DIRECTORY)]
    names = []
    if checkpoint_directory.is_relative_to(volume):
        names = [name for name in path_in(volume, checkpoint_directory).split("/") if name]
        shared += ["/".join(names[:depth]) for depth in range(1, len(names) + 1)]
    with contextlib.suppress(OSError), open_volume(volume) as root:
        make_own_folder(root).close()
        with contextlib.suppress(OSError):
            _clear_way(root, volume, names)
        for path in shared:
            make_shared_folder(root, path)


def _clear_way(root: Folder, volume: Path, names: Iterable[str]) -> None:
    """Move aside the first of nested folders that is none, and no link to one of the volume either."""
    above = ""
    for name in names:
        here = f"{above}/{name}" if above else name
        if not root.exists(here):
            return
        try:
            found = resolve_path(volume, f"{volume}/{here}")
            is_folder = not found or stat.S_ISDIR(root.status(found).st_mode)
        except KeepstepError as error:
            if error.kind is ErrorKind.VOLUME_UNUSABLE:
                # That may pass.
                return
            is_folder = False
        if not is_folder:
            with root.folder(above) as folder:
                move_aside_wrong_kinds(folder, {name: stat.S_IFDIR})
            return
        above = found


def make_shared_folder(volume: Folder, path: str) -> None:
    """Make a folder that the trainer may write to, below folders that exist, if it is missing. Raises OSError."""
    if not volume.exists(path):
        with volume.make_folder(path) as folder:
            _share(folder, os.fstat(volume.descriptor).st_mode)


def make_state_directory(volume: Path, state_directory: Path) -> None:
    """Make the directory where agent and restore keep their trusted state. Raises VolumeError."""
    try:
        volume.mkdir(VOLUME_MODE, parents=True, exist_ok=True)
        with open_volume(volume) as root:
            make_own_folder(root).close()
            # Never through a link that the trainer put in its place: it could lead to content of the trainer's choice.
            if state_directory.is_relative_to(volume):
                root.make_folder(path_in(volume, state_directory), 0o700).close()
            else:
                state_directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open_state_directory(volume, state_directory) as folder:
            move_aside_wrong_kinds(folder, IN_STATE_DIRECTORY)
    except OSError as error:
        raise VolumeError(
            ErrorKind.VOLUME_UNUSABLE,
            f"cannot make the state directory {state_directory}: {error.strerror}",
            hint="set --state-directory to a directory that the agent's user can write",
        ) from error


def open_state_directory(volume: Path, state_directory: Path) -> Folder:
    """Open the folder that `make_state_directory` made; on the volume, never through a link. Raises OSError."""
    if not state_directory.is_relative_to(volume):
        return open_volume(state_directory)
    with open_volume(volume) as root:
        return root.folder(path_in(volume, state_directory))


def share_tree(tree: Folder, volume: Folder) -> None:
    """Let the trainer remove the content of a tree that Keepstep made: that needs write permission on each folder.

    Blocks. Ignores OSError.
    """
    with contextlib.suppress(OSError):
        mode = os.fstat(volume.descriptor).st_mode
        for _, folder, _ in tree.walk():
            _share(folder, mode)


def _share(folder: Folder, mode: int) -> None:
    """Give the folder the volume's permissions for group and others, whatever the umask.

    Does nothing if only the owner may write the volume, or if its sticky bit lets users remove only their own files.
    """
    if mode & _OTHERS_WRITE and not mode & stat.S_ISVTX:
        os.fchmod(folder.descriptor, stat.S_IMODE(os.fstat(folder.descriptor).st_mode) | (mode & _SHARED_BITS))

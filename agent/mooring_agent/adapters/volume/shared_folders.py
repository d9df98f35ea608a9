"""The folders that trainer and agent both write into, which whoever may write the volume may write; and our own.

Whoever comes first makes them, and the usual umask would keep a trainer of another user out, though kubelet made the
volume for every user of the pod. Nothing is opened wider than the volume itself, and no folder of others is changed.
`.mooring` itself is not among them: what else is in it, the socket above all, only its owner may replace.
"""

import contextlib
import os
import stat
from pathlib import Path
from typing import Final

from mooring_agent.adapters.volume.shared_volume import Folder, open_volume, path_in
from mooring_agent.core.errors import ErrorKind, VolumeError
from mooring_api.names import RANKS_DIRECTORY, RECORDS_DIRECTORY, STATE_DIRECTORY

_OTHERS_WRITE: Final = 0o022
_OWN_MODE: Final = 0o755
_SHARED_BITS: Final = 0o077


def make_own_folder(root: Folder) -> Folder:
    """`.mooring`, which nobody but its owner may write: also where an earlier version, or a wide umask, let others."""
    folder = root.make_folder(STATE_DIRECTORY, _OWN_MODE)
    status = os.fstat(folder.descriptor)
    if status.st_uid == os.geteuid() and status.st_mode & _OTHERS_WRITE:
        # Some filesystems have one mode for all.
        with contextlib.suppress(OSError):
            os.fchmod(folder.descriptor, stat.S_IMODE(status.st_mode) & ~_OTHERS_WRITE)
    return folder


def make_shared_folders(volume: Path, checkpoint_directory: Path) -> None:
    """Make those that are missing, as far as that is possible: whoever needs one says what is wrong with it. Blocks."""
    shared = [f"{STATE_DIRECTORY}/{RECORDS_DIRECTORY}", f"{STATE_DIRECTORY}/{RANKS_DIRECTORY}"]
    if checkpoint_directory.is_relative_to(volume):
        names = path_in(volume, checkpoint_directory).split("/")
        shared += ["/".join(names[:depth]) for depth in range(1, len(names) + 1) if names[0]]
    with contextlib.suppress(OSError), open_volume(volume) as root:
        mode = os.fstat(root.descriptor).st_mode
        make_own_folder(root).close()
        for path in shared:
            if not root.exists(path):
                with root.make_folder(path) as folder:
                    _share(folder, mode)


def make_state_directory(volume: Path, state_directory: Path) -> None:
    """Where agent and restore keep what they believe. Raises VolumeError."""
    try:
        volume.mkdir(parents=True, exist_ok=True)
        if state_directory.is_relative_to(volume):
            # Whose content the trainer chose, by a link in its place, must not be believed.
            with open_volume(volume) as root:
                make_own_folder(root).close()
                root.make_folder(path_in(volume, state_directory), 0o700).close()
        else:
            state_directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise VolumeError(
            ErrorKind.VOLUME_UNUSABLE,
            f"cannot make the state directory {state_directory}: {error.strerror}",
            hint="give a --state-directory that the agent's user may write",
        ) from error


def open_state_directory(volume: Path, state_directory: Path) -> Folder:
    """The folder that `make_state_directory` made; through no link where it is on the volume. Raises OSError."""
    if not state_directory.is_relative_to(volume):
        return open_volume(state_directory)
    with open_volume(volume) as root:
        return root.folder(path_in(volume, state_directory))


def share_tree(tree: Folder, volume: Folder) -> None:
    """What we made for the trainer to remove one day: a folder's content goes only by whoever may write it. Blocks."""
    with contextlib.suppress(OSError):
        mode = os.fstat(volume.descriptor).st_mode
        for _, folder, _ in tree.walk():
            _share(folder, mode)


def _share(folder: Folder, mode: int) -> None:
    """After the umask. Where nobody else may write, or all keep their own (the sticky bit), nothing is shared."""
    if mode & _OTHERS_WRITE and not mode & stat.S_ISVTX:
        os.fchmod(folder.descriptor, stat.S_IMODE(os.fstat(folder.descriptor).st_mode) | (mode & _SHARED_BITS))

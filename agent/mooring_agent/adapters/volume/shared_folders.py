"""The folders that trainer and agent both write into: whoever may write the volume may write them.

Whoever comes first makes them, and the usual umask would keep a trainer of another user out, though kubelet made the
volume for every user of the pod. Nothing is opened wider than the volume itself, and no folder of others is changed.
"""

import contextlib
import os
import stat
from pathlib import Path
from typing import Final

from mooring_api.names import RANKS_DIRECTORY, RECORDS_DIRECTORY, STATE_DIRECTORY

_OTHERS_WRITE: Final = 0o022
_SHARED_BITS: Final = 0o077


def make_shared_folders(volume: Path, checkpoint_directory: Path) -> None:
    """Make those that are missing, as far as that is possible: whoever needs one says what is wrong with it. Blocks."""
    state = volume / STATE_DIRECTORY
    folders = [state, state / RECORDS_DIRECTORY, state / RANKS_DIRECTORY]
    if checkpoint_directory.is_relative_to(volume):
        below = checkpoint_directory.relative_to(volume)
        on_the_way = [volume / parent for parent in reversed(below.parents)]
        folders += [*on_the_way, checkpoint_directory]
    with contextlib.suppress(OSError):
        mode = volume.stat().st_mode
        for folder in folders:
            _make(folder, mode)


def share_tree(tree: Path, volume: Path) -> None:
    """What we made for the trainer to remove one day: a folder's content goes only by whoever may write it. Blocks."""
    with contextlib.suppress(OSError):
        mode = volume.stat().st_mode
        for folder, _, _ in os.walk(tree):
            _share(Path(folder), mode)


def _make(folder: Path, mode: int) -> None:
    try:
        folder.mkdir()
    except FileExistsError:
        return
    _share(folder, mode)


def _share(folder: Path, mode: int) -> None:
    """After the umask. Where nobody else may write, or all keep their own (the sticky bit), nothing is shared."""
    if mode & _OTHERS_WRITE and not mode & stat.S_ISVTX:
        folder.chmod(stat.S_IMODE(folder.stat().st_mode) | (mode & _SHARED_BITS))

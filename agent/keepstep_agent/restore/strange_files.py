"""Keeps files that no record of Keepstep's names, where something restored takes their place.

Such a file may be the user's. It stays where it is; one that has the name of a restored file gets another name beside
it, unless the bytes are the same. All functions block and raise OSError. None follows a link.
"""

import errno
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final

from keepstep_agent.adapters.volume.shared_volume import Folder

ASIDE_SUFFIX: Final = ".before-restore"
"""Of the name that a strange file gets if a restored one takes its own; `-2` and so on follow if that is taken."""

_COMPARED_BYTES: Final = 1024**2
_LONGEST_STEM_BYTES: Final = 230
"""Leaves room for the suffix in a name of 255 bytes."""
_NOT_THERE: Final = frozenset(
    {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EINVAL, errno.ENAMETOOLONG}
)


def remove_recorded(folder: Folder, name: str, paths: Iterable[str]) -> None:
    """Remove from `name` the files that a record names by `paths`, and the folders that are empty then.

    The empty path is `name` itself. A path that is no file any more is left alone: a trainer can write records.
    """
    emptied = {name}
    for path in paths:
        with _unless_not_there():
            folder.unlink(f"{name}/{path}".rstrip("/"))
        while "/" in path:
            path = path.rpartition("/")[0]
            emptied.add(f"{name}/{path}")
    for path in sorted(emptied, key=len, reverse=True):
        with _unless_not_there():
            folder.remove_if_empty(path)


def put_back(source: Folder, name: str, target: Folder, place: str) -> Iterator[str]:
    """Move what is under `name` to `place`, into the folder that may be there, and replace nothing.

    Yields the new name of each file or folder whose own is taken, relative to `target`.
    """
    if not target.exists(place):
        source.rename(name, target, place)
    elif _is_folder(source, name) and _is_folder(target, place):
        with source.folder(name) as old, target.folder(place) as new:
            # Those whose names are free first, so that none of them loses its name to one that needs another.
            for _, below in sorted((new.exists(entry.name), entry.name) for entry in old.entries()):
                for moved in put_back(old, below, new, below):
                    yield f"{place}/{moved}"
            new.sync()
        source.remove_if_empty(name)
    elif _are_same(source, name, target, place):
        source.unlink(name)
    else:
        free = _free_name(target, place)
        source.rename(name, target, free)
        yield free


def move_aside(folder: Folder, name: str) -> str:
    """Free a name: give what has it another one in the same folder, and return that."""
    free = _free_name(folder, name)
    folder.rename(name, folder, free)
    return free


def _free_name(folder: Folder, name: str) -> str:
    taken = {entry.name for entry in folder.entries()}
    stem = os.fsencode(name)[:_LONGEST_STEM_BYTES].decode(errors="ignore") + ASIDE_SUFFIX
    if stem not in taken:
        return stem
    return next(free for number in range(2, len(taken) + 3) if (free := f"{stem}-{number}") not in taken)


def _is_folder(folder: Folder, name: str) -> bool:
    return stat.S_ISDIR(folder.status(name).st_mode)


def _are_same(source: Folder, name: str, target: Folder, place: str) -> bool:
    """Return whether both are files with the same bytes. False for one that cannot be read."""
    try:
        with source.opened_file(name) as one, target.opened_file(place) as other:
            if os.path.sameopenfile(one, other):
                return True
            size_bytes = os.fstat(one).st_size
            return size_bytes == os.fstat(other).st_size and all(
                os.pread(one, _COMPARED_BYTES, offset) == os.pread(other, _COMPARED_BYTES, offset)
                for offset in range(0, size_bytes, _COMPARED_BYTES)
            )
    except OSError:
        return False


@contextmanager
def _unless_not_there() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in _NOT_THERE:
            raise

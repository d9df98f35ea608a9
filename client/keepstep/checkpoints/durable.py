"""Makes files survive a power cut."""

import os
from collections.abc import Iterator
from pathlib import Path

from keepstep.operating_system import DIRECTORY_FLAG, SYNC_MODE


def sync_directory(directory: Path) -> None:
    """Make what was created, renamed or removed in a directory survive, where that can be done. Raises OSError."""
    if DIRECTORY_FLAG is not None:
        _sync(directory, os.O_RDONLY | DIRECTORY_FLAG)


def sync_tree(root: Path) -> Iterator[tuple[str, int]]:
    """Make every file below `root` survive, or `root` itself if it is a file.

    Yields relative paths, with `/`, and sizes in bytes; the path is empty if `root` is the file. Raises OSError.
    """
    if root.is_file():
        yield "", _sync(root)
        sync_directory(root.parent)
        return
    for parent, _, names in os.walk(root, topdown=False, onerror=_raise):
        for name in sorted(names):
            path = Path(parent, name)
            if path.is_file() and not path.is_symlink():
                yield path.relative_to(root).as_posix(), _sync(path)
        sync_directory(Path(parent))


def _sync(path: Path, flags: int = SYNC_MODE) -> int:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
        return os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)


def _raise(error: OSError) -> None:
    raise error

"""Makes files survive a power cut."""

import os
from collections.abc import Iterator
from pathlib import Path


def sync_directory(directory: Path) -> None:
    """Make what was created, renamed or removed in a directory survive. Raises OSError."""
    _sync(directory, os.O_DIRECTORY)


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


def _sync(path: Path, flags: int = 0) -> int:
    descriptor = os.open(path, os.O_RDONLY | flags)
    try:
        os.fsync(descriptor)
        return os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)


def _raise(error: OSError) -> None:
    raise error

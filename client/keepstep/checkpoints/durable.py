"""Makes files survive a power cut."""

import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from keepstep.operating_system import DIRECTORY_FLAG, SYNC_MODE


def sync_directory(directory: Path) -> None:
    """Make what was created, renamed or removed in a directory survive, where that can be done. Raises OSError."""
    if DIRECTORY_FLAG is not None:
        _sync(directory, os.O_RDONLY | DIRECTORY_FLAG)


def write_durably(path: Path, content: bytes) -> None:
    """Write a file that is there whole or not at all, in place of one of that name. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def sync_files(root: Path, names: Iterable[str]) -> Iterator[tuple[str, int]]:
    """Make these files below `root` survive, as far as they are there. Yields as `sync_tree`. Raises OSError."""
    for name in names:
        with suppress(FileNotFoundError):
            yield name, _sync(root / name)


def sync_tree(root: Path) -> Iterator[tuple[str, int]]:
    """Make every file below `root` survive, or `root` itself if it is a file. Links are followed, as the agent does.

    Yields relative paths, with `/`, and sizes in bytes; the path is empty if `root` is the file. Raises OSError.
    """
    if root.is_file():
        yield "", _sync(root)
        sync_directory(root.parent)
        return
    for parent, folders, names in os.walk(root, onerror=_raise, followlinks=True):
        above = os.path.realpath(parent) + os.sep
        # Not a link to a folder that it is in: there is no end to that.
        folders[:] = [name for name in folders if not above.startswith(os.path.realpath(Path(parent, name)) + os.sep)]
        for name in sorted(names):
            path = Path(parent, name)
            if path.is_file():
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

"""Files in directories that only the agent writes to: durable writes, and opening regular files only."""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from keepstep_agent.adapters.volume.shared_volume import PARTIAL_SUFFIX

_RACES: Final = 64


def write_durably(path: Path, content: bytes) -> None:
    """Replace a file atomically: a reader, or a crash, sees either the old file or the new one."""
    partial = path.with_name(path.name + PARTIAL_SUFFIX)
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable: new, renamed and removed ones."""
    with opened(path, os.O_RDONLY | os.O_DIRECTORY) as descriptor:
        os.fsync(descriptor)


def make_folder(folder: Path) -> None:
    """Make a folder and its parents, if they are missing. Raises OSError.

    Retries, because `mkdir(exist_ok=True)` alone fails if the folder exists and then vanishes before it is examined.
    """
    for _ in range(_RACES):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, FileNotFoundError):
            if folder.is_file():
                raise
        else:
            return
    folder.mkdir(parents=True, exist_ok=True)


@contextmanager
def opened_regular(path: Path) -> Iterator[int]:
    """Open a regular file to read. Raises FileNotFoundError for a link, a directory, or a pipe, which would block."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise not_found(path) from error
        raise
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise not_found(path)
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def opened(path: Path, flags: int, mode: int = 0o777) -> Iterator[int]:
    descriptor = os.open(path, flags | os.O_CLOEXEC, mode)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def write_all(descriptor: int, data: bytes | bytearray | memoryview, position: int) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(descriptor, view, position)
        position += count
        view = view[count:]


def not_found(path: Path) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))

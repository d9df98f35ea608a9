"""Gives a downloaded file, or a link, its name in an open folder: complete, with its time, never through a link.

All functions block and raise OSError.
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from keepstep_agent.adapters.output.output_directories import PARTIAL
from keepstep_agent.adapters.volume.shared_volume import Folder
from keepstep_agent.core.errors import RequestError
from keepstep_agent.core.model import FileEntry
from keepstep_agent.core.stored.object_layout import check_link

_COPY_BYTES: Final = 64 * 1024**2
_OTHERS_WRITE: Final = 0o022
_READ_AND_WRITE: Final = 0o066


def place_file(incoming: Folder, entry: FileEntry, name: str, target: Folder) -> None:
    """Move the file `name` to the folder `target`, which may be on another filesystem."""
    with incoming.opened_file(name) as descriptor:
        _share(descriptor, target)
    set_time(incoming, name, entry)
    try:
        incoming.rename(name, target, name)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
    else:
        return
    with _partial(target) as copy:
        with incoming.opened_file(name) as source:
            while os.sendfile(copy, source, None, _COPY_BYTES):
                pass
        _share(copy, target)
        os.fsync(copy)
    set_time(target, PARTIAL, entry)
    target.rename(PARTIAL, target, name)
    incoming.unlink(name)


def place_link(entry: FileEntry, name: str, target: Folder) -> None:
    """Make the link `name` in the folder `target`. Replaces a file or a link."""
    try:
        check_link(entry.path, entry.link)
    except RequestError as error:
        raise OSError(errno.EINVAL, str(error), entry.path) from error
    target.unlink(PARTIAL)
    os.symlink(entry.link, PARTIAL, dir_fd=target.descriptor)
    set_time(target, PARTIAL, entry)
    target.rename(PARTIAL, target, name)


def set_time(folder: Folder, name: str, entry: FileEntry) -> None:
    """Set the mtime that the file had. The sync of its folder, after the rename, makes it durable too."""
    if entry.modified_ns is not None:
        times = (entry.modified_ns, entry.modified_ns)
        os.utime(name, ns=times, dir_fd=folder.descriptor, follow_symlinks=False)


def set_read_time(folder: Folder, name: str) -> None:
    """Set the time of a file's last read to that of its last write, as of a file that `set_time` was called for."""
    written_ns = folder.status(name).st_mtime_ns
    os.utime(name, ns=(written_ns, written_ns), dir_fd=folder.descriptor, follow_symlinks=False)


@contextmanager
def _partial(target: Folder) -> Iterator[int]:
    target.unlink(PARTIAL)
    try:
        with target.opened_file(PARTIAL, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as descriptor:
            yield descriptor
    except BaseException:
        target.unlink(PARTIAL)
        raise


def _share(descriptor: int, target: Folder) -> None:
    """Let everyone who may replace the file write into it, because programs write into files that they find."""
    folder_mode = os.fstat(target.descriptor).st_mode
    if folder_mode & _OTHERS_WRITE and not folder_mode & stat.S_ISVTX:
        with suppress(OSError):
            os.fchmod(descriptor, stat.S_IMODE(os.fstat(descriptor).st_mode) | (folder_mode & _READ_AND_WRITE))

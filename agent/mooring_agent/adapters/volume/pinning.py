"""One file into the staging area: by hard link, else by reflink, else by copy.

Must not know saves, ranks or descriptors; leaves it to the caller to make pins durable. Invariants: what is pinned is
the very file that was opened, however fast a trainer swaps names; a copy of a file that was written to meanwhile is an
error.
"""

import errno
import fcntl
import os
from pathlib import Path
from typing import Final

import structlog

from mooring_agent.adapters.volume.errors import volume_error
from mooring_agent.adapters.volume.shared_volume import Folder
from mooring_agent.core.errors import ErrorKind, VolumeError

_FICLONE: Final = 0x40049409
_LINK_REFUSALS: Final = frozenset({errno.EPERM, errno.EXDEV, errno.EMLINK, errno.EOPNOTSUPP})
_COPY_REFUSALS: Final = frozenset({errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP})
_COPY_STEP_BYTES: Final = 1 << 30
# A link, or a fifo, where a file was a moment ago.
_REPLACED: Final = frozenset({errno.ELOOP, errno.EINVAL})

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


class Pinner:
    """Pins files of one volume. Methods block and may be called from several threads."""

    def __init__(self, volume: Path) -> None:
        self._volume = volume
        self._reported: set[str] = set()

    def pin(self, source: Folder, name: str, target: Folder, target_name: str, *, private: bool) -> bool:
        """Make `target_name` hold the bytes of `name`; returns whether its inode is ours alone."""
        try:
            descriptor = source.open_file(name)
        except OSError as error:
            raise _changed(name) if error.errno in _REPLACED else volume_error(error, f"cannot open {name}") from error
        try:
            if not private:
                try:
                    target.link_open_file(descriptor, target_name)
                except OSError as error:
                    if error.errno not in _LINK_REFUSALS:
                        raise volume_error(error, f"cannot pin {name}") from error
                    self._report_once("hard_link_refused", error)
                else:
                    return False
            self._copy(descriptor, name, target, target_name)
        finally:
            os.close(descriptor)
        return True

    def _copy(self, descriptor: int, source: str, target: Folder, target_name: str) -> None:
        before = os.fstat(descriptor)
        try:
            copy = target.open_file(target_name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                try:
                    fcntl.ioctl(copy, _FICLONE, descriptor)
                except OSError as error:
                    if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EIO}:
                        raise
                    self._report_once("reflink_refused", error)
                    _copy_bytes(descriptor, copy, before.st_size)
            finally:
                os.close(copy)
        except OSError as error:
            raise volume_error(error, f"cannot copy {source}") from error
        after = os.fstat(descriptor)
        if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
            raise _changed(source)

    def _report_once(self, event: str, error: OSError) -> None:
        if event not in self._reported:
            self._reported.add(event)
            fallback = "copy" if event == "reflink_refused" else "reflink"
            _log.warning(event, volume=str(self._volume), reason=os.strerror(error.errno or 0), fallback=fallback)


def _copy_bytes(source: int, target: int, size_bytes: int) -> None:
    """Copy at least `size_bytes`, and more if the file grew: the caller finds out by its size."""
    offset = 0
    in_kernel = True
    while offset < size_bytes:
        wanted = min(_COPY_STEP_BYTES, size_bytes - offset)
        try:
            if in_kernel:
                count = os.copy_file_range(source, target, wanted, offset, offset)
            else:
                count = os.sendfile(target, source, offset, wanted)
        except OSError as error:
            if not in_kernel or error.errno not in _COPY_REFUSALS:
                raise
            # Between filesystems of different kinds; sendfile moves the target's file offset, so set it first.
            in_kernel = False
            os.lseek(target, offset, os.SEEK_SET)
            continue
        if count == 0:
            return
        offset += count


def _changed(source: str) -> VolumeError:
    return VolumeError(
        ErrorKind.FILE_CHANGED,
        f"{source} was replaced or written to while it was being staged",
        hint="announce a checkpoint after its last file is written, and do not write to it again",
    )

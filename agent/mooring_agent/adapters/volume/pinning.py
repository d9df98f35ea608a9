"""One file into the staging area: by hard link, else by reflink, else by copy; and the proof of which file it was.

Must not know saves, ranks or descriptors; leaves it to the caller to make pins durable. Invariants: what is pinned is
the very file that was opened and found to lie in the volume, however fast a trainer swaps names; a copy of a file that
was written to meanwhile is an error. A checkpoint can have ten thousand files: paths are strings, for pathlib's objects
cost more than the calls to the kernel.
"""

import errno
import fcntl
import os
import stat
from pathlib import Path
from typing import Final

import structlog

from mooring_agent.adapters.volume.errors import volume_error
from mooring_agent.core.errors import ErrorKind, RequestError, VolumeError

_FICLONE: Final = 0x40049409
_LINK_REFUSALS: Final = frozenset({errno.EPERM, errno.EXDEV, errno.EMLINK, errno.EOPNOTSUPP})
_COPY_REFUSALS: Final = frozenset({errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP})
_COPY_STEP_BYTES: Final = 1 << 30

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


class Pinner:
    """Pins files of one volume. Methods block and may be called from several threads."""

    def __init__(self, volume: Path) -> None:
        self._volume = volume
        self._inside = f"{volume}/"
        self._reported: set[str] = set()

    def pin(self, source: str, target: str, *, private: bool) -> bool:
        """Make `target` hold the bytes of `source`, a resolved path; returns whether its inode is ours alone."""
        descriptor = self._open(source)
        try:
            if not private:
                try:
                    os.link(source, target)
                except OSError as error:
                    if error.errno not in _LINK_REFUSALS:
                        raise volume_error(error, f"cannot pin {source}") from error
                    self._report_once("hard_link_refused", error)
                else:
                    # Names may have moved since the file was opened: only the inode says what was linked.
                    linked, opened = os.lstat(target), os.fstat(descriptor)
                    if (linked.st_dev, linked.st_ino) != (opened.st_dev, opened.st_ino):
                        raise _changed(source)
                    return False
            self._copy(descriptor, source, target)
        finally:
            os.close(descriptor)
        return True

    def _open(self, source: str) -> int:
        try:
            # O_NONBLOCK: a name that became a fifo since the scan must not hang the agent.
            descriptor = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise (
                _changed(source) if error.errno == errno.ELOOP else volume_error(error, f"cannot open {source}")
            ) from error
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise _changed(source)
            real = os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115 - paths are strings here, see above
            if not real.startswith(self._inside):
                raise RequestError(
                    ErrorKind.PATH_OUTSIDE_VOLUME,
                    f"{source} leads to {real}, outside the volume {self._volume}",
                    hint="save into the shared volume, without links that leave it",
                )
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _copy(self, descriptor: int, source: str, target: str) -> None:
        before = os.fstat(descriptor)
        try:
            copy = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
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

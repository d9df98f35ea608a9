"""Measures how full the volume is, and reserves a few megabytes for when it is full.

Usage is counted as kubelet counts it: statvfs does not show a sizeLimit, so the blocks of all files are added up. A
file with several hard links counts once, other filesystems below the volume do not count, and files may vanish during
the walk. The reserve is deleted when the disk is full, so that a just-in-time save can still be announced: its
directory entries, descriptor and journal records need a few blocks. The reserve file is fully allocated or absent.
"""

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Final

import structlog

from keepstep_agent.adapters.volume.errors import volume_error
from keepstep_agent.adapters.volume.shared_volume import PARTIAL_SUFFIX, open_volume
from keepstep_agent.ports import DiskReading
from keepstep_api.names import RESERVE, STATE_DIRECTORY

_BLOCK_BYTES: Final = 512
# The folder vanished, was replaced by a link, or is on another filesystem.
_NOT_OURS: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EXDEV})

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


class VolumeMeter:
    """Measures one volume.

    Folders that the agent may not read (lost+found, for one) are not counted; each is logged once.
    """

    def __init__(self, volume: Path) -> None:
        self._volume = volume
        self._reported: set[str] = set()

    def measure(self) -> DiskReading:
        """Walk the volume (about 3 s per million files). Blocks: call it off the event loop. Raises VolumeError."""
        try:
            used_bytes = self._used_bytes()
            filesystem = os.statvfs(self._volume)
        except OSError as error:
            raise volume_error(error, f"cannot measure {self._volume}") from error
        return DiskReading(
            used_bytes=used_bytes,
            free_bytes=filesystem.f_bavail * filesystem.f_frsize,
            total_bytes=filesystem.f_blocks * filesystem.f_frsize,
        )

    def _used_bytes(self) -> int:
        with open_volume(self._volume) as root:
            here = os.fstat(root.descriptor)
            blocks = here.st_blocks
            counted: set[int] = set()
            for _, folder, entries in root.walk(self._left_out):
                for entry in entries:
                    with suppress(FileNotFoundError):
                        status = folder.status_of(entry)
                        if stat.S_ISDIR(status.st_mode):
                            blocks += status.st_blocks if status.st_dev == here.st_dev else 0
                            continue
                        if status.st_nlink > 1:
                            if status.st_ino in counted:
                                continue
                            counted.add(status.st_ino)
                        blocks += status.st_blocks
        return blocks * _BLOCK_BYTES

    def _left_out(self, folder: str, error: OSError) -> None:
        is_too_large = error.errno == errno.EOVERFLOW
        if not folder and not is_too_large:
            raise error
        if error.errno not in _NOT_OURS and folder not in self._reported:
            self._reported.add(folder)
            _log.warning(
                "disk.folder_unreadable",
                folder=f"{self._volume}/{folder.rstrip('/')}",
                reason=str(error),
                hint="what was not read is not counted: keep fewer files on the volume"
                if is_too_large
                else "its contents are not counted; if they are large, give the agent the trainer's UID or GID",
            )


RESERVE_BYTES: Final = 8 * 1024 * 1024


class Reserve:
    """Disk space set aside for a full volume.

    `keep` and `spend` are idempotent and may be called from any thread.
    """

    def __init__(self, volume: Path) -> None:
        self._volume = volume
        self._path = f"{STATE_DIRECTORY}/{RESERVE}"

    def keep(self) -> None:
        """Reserve the space if it is not reserved. If the volume has too little, log a warning and go on."""
        partial = self._path + PARTIAL_SUFFIX
        try:
            with open_volume(self._volume) as root:
                if root.exists(self._path):
                    return
                try:
                    with root.opened_file(partial, os.O_WRONLY | os.O_CREAT, 0o600) as descriptor:
                        os.posix_fallocate(descriptor, 0, RESERVE_BYTES)
                    root.rename(partial, root, self._path)
                except OSError:
                    with suppress(OSError):
                        root.unlink(partial)
                    raise
        except OSError as error:
            _log.warning("reserve.not_kept", path=f"{self._volume}/{self._path}", reason=str(error))

    def spend(self) -> bool:
        """Free the reserved space; return False if there was none."""
        try:
            with open_volume(self._volume) as root:
                if not root.exists(self._path):
                    return False
                root.unlink(self._path)
        except OSError:
            return False
        _log.warning("reserve.spent", path=f"{self._volume}/{self._path}")
        return True

"""How full the volume is, and a reserve of a few megabytes for when it is full.

Usage is counted as kubelet counts it: statvfs does not show a sizeLimit, so the blocks of all files are added up. A
file with several hard links counts once, other filesystems below the volume do not count, and files may vanish during
the walk. The reserve is given up on a full disk, so that a just-in-time save can still be announced: its directory
entries, descriptor and journal records need a few blocks. The reserve file is allocated whole or absent.
"""

import contextlib
import errno
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Final

import structlog

from mooring_agent.adapters.volume.errors import volume_error
from mooring_agent.adapters.volume.shared_volume import PARTIAL_SUFFIX, open_volume
from mooring_agent.ports import DiskReading
from mooring_api.names import RESERVE, STATE_DIRECTORY

_BLOCK_BYTES: Final = 512
# Gone meanwhile, replaced by a link meanwhile, or another filesystem.
_NOT_OURS: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EXDEV})

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


class VolumeMeter:
    """Measures one volume, again and again.

    What is below a folder that is not ours to read (lost+found, for one) is left out, and said once.
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
            for _, _, entries in root.walk(self._left_out):
                for entry in entries:
                    with suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
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
        if not folder:
            raise error
        if error.errno not in _NOT_OURS and folder not in self._reported:
            self._reported.add(folder)
            _log.warning(
                "disk.folder_unreadable",
                folder=f"{self._volume}/{folder.rstrip('/')}",
                reason=str(error),
                hint="what it holds is not counted: give the agent the trainer's UID or GID if that is much",
            )


RESERVE_BYTES: Final = 8 * 1024 * 1024


class Reserve:
    """`keep` and `spend` are idempotent and may be called from any thread."""

    def __init__(self, volume: Path) -> None:
        self._volume = volume
        self._path = f"{STATE_DIRECTORY}/{RESERVE}"

    def keep(self) -> None:
        """Set the room aside again if it is not there; a volume without room for it goes without."""
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
                    with contextlib.suppress(OSError):
                        root.unlink(partial)
                    raise
        except OSError as error:
            _log.warning("reserve.not_kept", path=f"{self._volume}/{self._path}", reason=str(error))

    def spend(self) -> bool:
        """Give the room up; False if there was none to give."""
        try:
            with open_volume(self._volume) as root:
                if not root.exists(self._path):
                    return False
                root.unlink(self._path)
        except OSError:
            return False
        _log.warning("reserve.spent", path=f"{self._volume}/{self._path}")
        return True

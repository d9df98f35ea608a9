"""How full the volume is, counted as kubelet counts it: sizeLimit is not visible in statvfs, so we add up the blocks.

Owns the walk. Knows nothing of budgets. Invariants: a file with several hard links counts once; what vanishes during
the walk is not an error; other filesystems mounted below the volume are not counted.
"""

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Final

import structlog

from mooring_agent.adapters.volume.errors import volume_error
from mooring_agent.adapters.volume.shared_volume import open_volume
from mooring_agent.ports import DiskReading

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

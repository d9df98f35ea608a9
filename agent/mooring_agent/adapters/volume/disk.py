"""How full the volume is, counted as kubelet counts it: sizeLimit is not visible in statvfs, so we add up the blocks.

Owns the walk. Knows nothing of budgets. Invariants: a file with several hard links counts once; what vanishes during
the walk is not an error; other filesystems mounted below the volume are not counted.
"""

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import structlog

from mooring_agent.adapters.volume.errors import volume_error
from mooring_agent.ports import DiskReading

_BLOCK_BYTES: Final = 512

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
        root = self._volume.stat()
        blocks = root.st_blocks
        counted: set[int] = set()
        waiting = [str(self._volume)]
        while waiting:
            folder = waiting.pop()
            try:
                found = list(_entries(folder))
            except FileNotFoundError:
                continue
            except PermissionError as error:
                if folder == str(self._volume):
                    raise
                self._report_once(folder, error)
                continue
            for path, status in found:
                if status.st_dev != root.st_dev:
                    continue
                if stat.S_ISDIR(status.st_mode):
                    waiting.append(path)
                elif status.st_nlink > 1:
                    if status.st_ino in counted:
                        continue
                    counted.add(status.st_ino)
                blocks += status.st_blocks
        return blocks * _BLOCK_BYTES

    def _report_once(self, folder: str, error: OSError) -> None:
        if folder not in self._reported:
            self._reported.add(folder)
            _log.warning(
                "disk.folder_unreadable",
                folder=folder,
                reason=str(error),
                hint="what it holds is not counted: give the agent the trainer's UID or GID if that is much",
            )


def _entries(folder: str) -> Iterator[tuple[str, os.stat_result]]:
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                yield entry.path, entry.stat(follow_symlinks=False)

"""Room set aside on the volume, to be given up when it is full: a few megabytes that still take what matters most.

A full disk is when a just-in-time save is announced, and its directory entries, its descriptor and its journal records
need some blocks. Invariant: the file is either allocated whole or absent.
"""

import contextlib
import os
from pathlib import Path
from typing import Final

import structlog

from mooring_agent.adapters.volume.shared_volume import PARTIAL_SUFFIX, open_volume
from mooring_api.names import RESERVE, STATE_DIRECTORY

RESERVE_BYTES: Final = 8 * 1024 * 1024

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


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
            _log.warning("reserve_not_kept", path=f"{self._volume}/{self._path}", reason=str(error))

    def spend(self) -> bool:
        """Give the room up; False if there was none to give."""
        try:
            with open_volume(self._volume) as root:
                if not root.exists(self._path):
                    return False
                root.unlink(self._path)
        except OSError:
            return False
        _log.warning("reserve_spent", path=f"{self._volume}/{self._path}")
        return True

"""Room set aside on the volume, to be given up when it is full: a few megabytes that still take what matters most.

A full disk is when a just-in-time save is announced, and its directory entries, its descriptor and its journal records
need some blocks. Invariant: the file is either allocated whole or absent.
"""

import contextlib
import os
from pathlib import Path
from typing import Final

import structlog

from mooring_api.names import RESERVE

RESERVE_BYTES: Final = 8 * 1024 * 1024

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


class Reserve:
    """`folder` is the volume's state directory. `keep` and `spend` are idempotent and may be called from any thread."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / RESERVE

    def keep(self) -> None:
        """Set the room aside again if it is not there; a volume without room for it goes without."""
        if self._path.exists():
            return
        partial = self._path.with_suffix(".partial")
        try:
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, RESERVE_BYTES)
            finally:
                os.close(descriptor)
            partial.rename(self._path)
        except OSError as error:
            _log.warning("reserve_not_kept", path=str(self._path), reason=str(error))
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)

    def spend(self) -> bool:
        """Give the room up; False if there was none to give."""
        try:
            self._path.unlink()
        except OSError:
            return False
        _log.warning("reserve_spent", path=str(self._path))
        return True

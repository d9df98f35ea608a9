"""The gate: what is asked of this process at a step. All ranks of a job get the same answer for the same step.

Owns the sources of a request: SIGTERM and the doorbell. Must not know what a save is. It is asked in every step, so it
costs about a microsecond: no system call but a look, once a second, whether the agent has made its doorbell.
"""

import functools
import logging
import mmap
import os
import signal
import threading
import time
import weakref
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import Any, Final, Protocol

from mooring_api import doorbell

_log: Final = logging.getLogger("mooring")
_DOORBELL_LOOK_SECONDS: Final = 1.0
_RING: Final = slice(doorbell.RING_OFFSET, doorbell.RING_OFFSET + 8)
_NEVER_RUNG: Final = bytes(8)


class Ask(StrEnum):
    """What is asked at a step."""

    NOTHING = "nothing"
    SAVE = "save"
    STOP = "stop"
    """Save just in time, then leave."""


class Gate(Protocol):
    """May be asked several times at one step; there the answer only grows, and STOP stays for good."""

    def at(self, step: int) -> Ask:
        """What is asked of this process at `step`: the same on all ranks."""

    @property
    def signalled(self) -> bool:
        """This process itself got SIGTERM, so the agent may not know."""

    def notice(self) -> None:
        """Take a termination notice that came some other way."""

    def close(self) -> None:
        """Give the signal back; idempotent."""


class SingleProcessGate:
    """The gate of a job with one process: this process, at its next step."""

    def __init__(self, doorbell_path: Path) -> None:
        self._stop = False
        self._signalled = False
        self._save_asked = False
        self._save_step: int | None = None
        self._doorbell = _Doorbell(doorbell_path)
        self._previous: Any = None
        self._installed = False
        if self._doorbell.rung_before_start():
            self._stop = True
        self._install()

    def at(self, step: int) -> Ask:
        ring = self._doorbell.new_ring()
        if ring is not None:
            self._stop |= ring.terminating
            self._save_asked |= not ring.terminating
        if self._stop:
            return Ask.STOP
        if self._save_asked:
            self._save_asked = False
            self._save_step = step
        return Ask.SAVE if step == self._save_step else Ask.NOTHING

    @property
    def signalled(self) -> bool:
        return self._signalled

    def notice(self) -> None:
        self._stop = True

    def close(self) -> None:
        self._doorbell.close()
        if threading.current_thread() is threading.main_thread():
            self._restore()

    def _install(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            _log.warning("SIGTERM is not watched: only the main thread can, and the Checkpointer was made in another")
            return
        self._previous = signal.signal(signal.SIGTERM, self._on_sigterm)
        self._installed = True
        # A forked DataLoader worker must die of the SIGTERM with which its loader ends it.
        os.register_at_fork(after_in_child=functools.partial(_restore_in_child, weakref.ref(self)))

    def _on_sigterm(self, signal_number: int, frame: FrameType | None) -> None:
        self._signalled = self._stop = True
        if callable(self._previous):
            try:
                self._previous(signal_number, frame)
            except SystemExit:
                # It would have left at once; we leave too, after the just-in-time save.
                return

    def _restore(self) -> None:
        # Somebody who installed a handler after us keeps it.
        if self._installed and signal.getsignal(signal.SIGTERM) == self._on_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_DFL if self._previous is None else self._previous)
        self._installed = False


def _restore_in_child(reference: "weakref.ref[SingleProcessGate]") -> None:
    gate = reference()
    if gate is not None:
        gate._restore()


class _Doorbell:
    """The mapped doorbell; the agent makes it, perhaps after us, and perhaps anew."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._map: mmap.mmap | None = None
        self._inode: tuple[int, int] | None = None
        self._look_at = 0.0
        self._seen = _NEVER_RUNG
        self._open()

    def rung_before_start(self) -> bool:
        """Whether an earlier ring still says that the pod is ending. Any other earlier ring was for someone else."""
        if self._map is None:
            return False
        ring = doorbell.decode(self._map[:])
        self._seen = self._map[_RING]
        return ring.terminating and ring.deadline_unix > time.time()

    def new_ring(self) -> doorbell.Ring | None:
        if time.monotonic() >= self._look_at:
            self._open()
        if self._map is None or self._map[_RING] == self._seen:
            return None
        self._seen = self._map[_RING]
        ring = doorbell.decode(self._map[:])
        return ring if ring.ring else None

    def close(self) -> None:
        if self._map is not None:
            self._map.close()
            self._map = None
        self._look_at = float("inf")

    def _open(self) -> None:
        self._look_at = time.monotonic() + _DOORBELL_LOOK_SECONDS
        try:
            found = self._path.stat()
            # A shorter file is still being made, and reading its mapping would be fatal.
            if (found.st_dev, found.st_ino) == self._inode or found.st_size < doorbell.SIZE_BYTES:
                return
            with self._path.open("rb") as file:
                mapped = mmap.mmap(file.fileno(), doorbell.SIZE_BYTES, access=mmap.ACCESS_READ)
        except (OSError, ValueError):
            return
        if self._map is not None:
            self._map.close()
        self._map, self._inode = mapped, (found.st_dev, found.st_ino)

"""Rings the doorbell file that trainers have mapped (`mooring_api.doorbell`).

Invariants: the file is never replaced or shortened, a mapping stays good for the life of the volume; the ring counter
goes on from what is in the file after a restart of the agent; it is written last, so a new ring has its own deadline.
"""

import os
from pathlib import Path
from typing import Final

from mooring_agent.adapters.volume.durable_files import partial_of
from mooring_agent.adapters.volume.errors import volume_error
from mooring_api.doorbell import RING_OFFSET, SIZE_BYTES, Ring, decode, encode

_MODE: Final = 0o660
_AFTER_RING: Final = RING_OFFSET + 8


class Doorbell:
    """The agent's end; one agent rings at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def ring(self, *, deadline_unix: float, terminating: bool) -> int:
        """Ask every trainer to save; returns the number of this ring. Raises VolumeError."""
        try:
            self._make()
            descriptor = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
            try:
                last = decode(os.pread(descriptor, SIZE_BYTES, 0)).ring
                ring = Ring(ring=last + 1, deadline_unix=deadline_unix, terminating=terminating)
                content = encode(ring)
                os.pwrite(descriptor, content[_AFTER_RING:], _AFTER_RING)
                os.pwrite(descriptor, content[:RING_OFFSET], 0)
                os.pwrite(descriptor, content[RING_OFFSET:_AFTER_RING], RING_OFFSET)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise volume_error(error, f"cannot ring the doorbell {self._path}") from error
        return ring.ring

    def forget_termination(self) -> None:
        """Take back an earlier pod's termination notice: trainers that start now have nothing to do with it.

        Raises VolumeError. The ring counter stays, so nobody is asked to save.
        """
        last = self.current()
        if not last.terminating:
            return
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
            try:
                os.pwrite(descriptor, encode(Ring(ring=last.ring))[_AFTER_RING:], _AFTER_RING)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise volume_error(error, f"cannot write the doorbell {self._path}") from error

    def current(self) -> Ring:
        """What a trainer would read now. Raises VolumeError."""
        try:
            return decode(self._path.read_bytes())
        except FileNotFoundError:
            return Ring()
        except OSError as error:
            raise volume_error(error, f"cannot read the doorbell {self._path}") from error

    def _make(self) -> None:
        if self._path.exists():
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        partial = partial_of(self._path)
        partial.write_bytes(encode(Ring()))
        # After the umask, which must not keep a trainer with only our group out.
        partial.chmod(_MODE)
        partial.rename(self._path)

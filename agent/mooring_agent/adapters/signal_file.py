"""Rings the doorbell file that trainers have mapped (`mooring_api.signal_file`).

Invariants: the file is never replaced or shortened, a mapping stays good for the life of the volume; the ring counter
goes on from what is in the file after a restart of the agent; it is written last, so a new ring has its own deadline.
"""

import os
from pathlib import Path
from typing import Final

from mooring_agent.adapters.volume.errors import volume_error
from mooring_agent.adapters.volume.shared_volume import PARTIAL_SUFFIX, Folder, open_volume
from mooring_api.names import DOORBELL, STATE_DIRECTORY
from mooring_api.signal_file import RING_OFFSET, SIZE_BYTES, SaveSignal, decode, encode

_PATH: Final = f"{STATE_DIRECTORY}/{DOORBELL}"
_MODE: Final = 0o660
_AFTER_RING: Final = RING_OFFSET + 8
_LAST_RING: Final = 2**64 - 1


class SignalFile:
    """The agent's end; one agent rings at a time."""

    def __init__(self, volume: Path) -> None:
        self._volume = volume
        self._shown = f"{volume}/{_PATH}"

    def ring(self, *, deadline_unix: float, terminating: bool) -> int:
        """Ask every trainer to save; returns the number of this ring. Raises VolumeError."""
        try:
            with open_volume(self._volume) as root:
                _make(root)
                with root.opened_file(_PATH, os.O_RDWR) as descriptor:
                    last = decode(os.pread(descriptor, SIZE_BYTES, 0)).ring
                    # A trainer may have written there; it is asked all the same.
                    ring = SaveSignal(ring=last % _LAST_RING + 1, deadline_unix=deadline_unix, terminating=terminating)
                    content = encode(ring)
                    os.pwrite(descriptor, content[_AFTER_RING:], _AFTER_RING)
                    os.pwrite(descriptor, content[:RING_OFFSET], 0)
                    os.pwrite(descriptor, content[RING_OFFSET:_AFTER_RING], RING_OFFSET)
        except OSError as error:
            raise volume_error(error, f"cannot ring the doorbell {self._shown}") from error
        return ring.ring

    def forget_termination(self) -> None:
        """Take back an earlier pod's termination notice: trainers that start now have nothing to do with it.

        Raises VolumeError. The ring counter stays, so nobody is asked to save.
        """
        last = self.current()
        if not last.terminating:
            return
        try:
            with open_volume(self._volume) as root, root.opened_file(_PATH, os.O_RDWR) as descriptor:
                os.pwrite(descriptor, encode(SaveSignal(ring=last.ring))[_AFTER_RING:], _AFTER_RING)
        except OSError as error:
            raise volume_error(error, f"cannot write the doorbell {self._shown}") from error

    def current(self) -> SaveSignal:
        """What a trainer would read now. Raises VolumeError."""
        try:
            with open_volume(self._volume) as root, root.opened_file(_PATH) as descriptor:
                return decode(os.pread(descriptor, SIZE_BYTES, 0))
        except FileNotFoundError:
            return SaveSignal()
        except OSError as error:
            raise volume_error(error, f"cannot read the doorbell {self._shown}") from error


def _make(root: Folder) -> None:
    if root.exists(_PATH):
        return
    root.make_folder(STATE_DIRECTORY, 0o755).close()
    partial = _PATH + PARTIAL_SUFFIX
    root.unlink(partial)
    with root.opened_file(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as descriptor:
        os.write(descriptor, encode(SaveSignal()))
        # After the umask, which must not keep a trainer with only our group out.
        os.fchmod(descriptor, _MODE)
    root.rename(partial, root, _PATH)

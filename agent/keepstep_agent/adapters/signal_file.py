"""Writes save requests to the signal file that trainers have mapped (`keepstep_api.signal_file`).

Invariants: the file is never replaced or shortened, so a mapping is valid for the life of the volume; after a restart
of the agent the request numbers continue from the one in the file; the number is written last, so that a trainer never
sees a new request with an old deadline.
"""

import os
from pathlib import Path
from typing import Final

from keepstep_agent.adapters.volume.errors import volume_error
from keepstep_agent.adapters.volume.shared_volume import PARTIAL_SUFFIX, Folder, open_volume
from keepstep_api.names import SIGNAL_FILE, STATE_DIRECTORY
from keepstep_api.signal_file import NUMBER_OFFSET, SIZE_BYTES, SaveSignal, decode, encode

_PATH: Final = f"{STATE_DIRECTORY}/{SIGNAL_FILE}"
_MODE: Final = 0o660
_AFTER_NUMBER: Final = NUMBER_OFFSET + 8
_LAST_NUMBER: Final = 2**64 - 1


class SignalFile:
    """The agent's end of the signal file. One agent writes at a time."""

    def __init__(self, volume: Path) -> None:
        self._volume = volume
        self._shown = f"{volume}/{_PATH}"

    def request(self, *, deadline_unix: float, terminating: bool) -> int:
        """Ask every trainer to save. Return the number of this request. Raises VolumeError."""
        try:
            with open_volume(self._volume) as root:
                _make(root)
                with root.opened_file(_PATH, os.O_RDWR) as descriptor:
                    last = decode(os.pread(descriptor, SIZE_BYTES, 0)).number
                    # A trainer may have written any number there; the modulo keeps the next one in range.
                    signal = SaveSignal(
                        number=last % _LAST_NUMBER + 1, deadline_unix=deadline_unix, terminating=terminating
                    )
                    content = encode(signal)
                    os.pwrite(descriptor, content[_AFTER_NUMBER:], _AFTER_NUMBER)
                    os.pwrite(descriptor, content[:NUMBER_OFFSET], 0)
                    os.pwrite(descriptor, content[NUMBER_OFFSET:_AFTER_NUMBER], NUMBER_OFFSET)
        except OSError as error:
            raise volume_error(error, f"cannot write the signal file {self._shown}") from error
        return signal.number

    def forget_termination(self) -> None:
        """Cancel an earlier termination notice, which does not concern the trainers that start on this volume now.

        Raises VolumeError. The number stays, so nobody is asked to save.
        """
        last = self.current()
        if not last.terminating:
            return
        try:
            with open_volume(self._volume) as root, root.opened_file(_PATH, os.O_RDWR) as descriptor:
                os.pwrite(descriptor, encode(SaveSignal(number=last.number))[_AFTER_NUMBER:], _AFTER_NUMBER)
        except OSError as error:
            raise volume_error(error, f"cannot write the signal file {self._shown}") from error

    def current(self) -> SaveSignal:
        """Return what a trainer would read. Raises VolumeError."""
        try:
            with open_volume(self._volume) as root, root.opened_file(_PATH) as descriptor:
                return decode(os.pread(descriptor, SIZE_BYTES, 0))
        except FileNotFoundError:
            return SaveSignal()
        except OSError as error:
            raise volume_error(error, f"cannot read the signal file {self._shown}") from error


def _make(root: Folder) -> None:
    if root.exists(_PATH):
        return
    root.make_folder(STATE_DIRECTORY, 0o755).close()
    partial = _PATH + PARTIAL_SUFFIX
    root.unlink(partial)
    with root.opened_file(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as descriptor:
        os.write(descriptor, encode(SaveSignal()))
        # Explicitly, because the umask could keep out a trainer that shares only the agent's group.
        os.fchmod(descriptor, _MODE)
    root.rename(partial, root, _PATH)

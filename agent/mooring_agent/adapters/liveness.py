"""Whether a training process lives, by the POSIX record lock it holds in the volume: the kernel drops it when it dies.

And what it is about to announce: the locked file says so, and with its lock a process loses its claims.

Only asks (F_GETLK), never takes a lock, so it cannot get in a trainer's way. A forked child does not inherit the lock.
Invariant: a lock that this very process holds is not seen; trainers are other processes.
"""

import fcntl
import json
import os
import struct
from pathlib import Path
from typing import Final

from mooring_agent.adapters.volume.errors import volume_error
from mooring_agent.core.errors import MooringError
from mooring_api.names import RANKS_DIRECTORY, STATE_DIRECTORY

# struct flock of 64-bit Linux: type, whence, start, length, pid; the last field pads it to the kernel's size.
_FLOCK: Final = struct.Struct("hhqqi0q")
_WHOLE_FILE: Final = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)


class RankLocks:
    """The liveness locks of one volume. Each question costs three system calls."""

    def __init__(self, volume: Path) -> None:
        self._volume = volume
        self._folder = volume / STATE_DIRECTORY / RANKS_DIRECTORY

    def held(self, local_rank: int) -> bool:
        """Whether a live process holds this rank's lock; a rank that never had one is not held."""
        path = self._folder / str(local_rank)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise volume_error(error, f"cannot ask for the lock {path}") from error
        try:
            answer = fcntl.fcntl(descriptor, fcntl.F_GETLK, _WHOLE_FILE)
        except OSError as error:
            raise volume_error(error, f"cannot ask for the lock {path}") from error
        finally:
            os.close(descriptor)
        return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)

    def live_ranks(self) -> frozenset[int]:
        """Local ranks whose lock is held now."""
        try:
            names = [entry.name for entry in self._folder.iterdir()]
        except FileNotFoundError:
            return frozenset()
        except OSError as error:
            raise volume_error(error, f"cannot list {self._folder}") from error
        ranks = (int(name) for name in names if name.isascii() and name.isdigit())
        return frozenset(rank for rank in ranks if self.held(rank))

    def claim(self, checkpoint: Path) -> bool:
        """Whether a live process is about to announce what is at that path. Never raises."""
        try:
            return any(self._claims(rank, checkpoint) for rank in self.live_ranks())
        except MooringError:
            # To store it twice is better than never.
            return False

    def _claims(self, rank: int, checkpoint: Path) -> bool:
        try:
            content = (self._folder / str(rank)).read_bytes()
            claims = json.loads(content) if content else []
            return any((self._volume / claim).resolve() == checkpoint.resolve() for claim in claims)
        except (OSError, ValueError, TypeError):
            # It is being written just now, and says something at the next look.
            return True

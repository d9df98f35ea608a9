"""Finds which training processes are alive, by the POSIX record locks that they hold in the volume.

The kernel drops a lock when its process dies. The locked file lists what the process is about to announce (its claims),
and a process that loses its lock loses its claims. A file beside it says which step the process is at.

Only queries locks and never takes one, so it cannot disturb a trainer. A forked child does not inherit the lock.
"""

import json
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Final

from keepstep_agent.adapters.volume.errors import volume_error
from keepstep_agent.adapters.volume.shared_volume import Folder, open_volume
from keepstep_agent.core.limits import CLAIMS_BYTES
from keepstep_api.liveness_lock import holder
from keepstep_api.names import RANKS_DIRECTORY, STATE_DIRECTORY
from keepstep_api.step_file import SIZE_BYTES, SUFFIX, StepRecord, decode

_FOLDER: Final = f"{STATE_DIRECTORY}/{RANKS_DIRECTORY}"
_RANK: Final = re.compile("[0-9]{1,6}")


class RankLocks:
    """The liveness locks of one volume. Each query costs a few system calls."""

    def __init__(self, volume: Path) -> None:
        self._volume = volume

    def live_ranks(self) -> frozenset[int]:
        """Return the local ranks whose lock is held at present. Raises VolumeError."""
        try:
            with open_volume(self._volume) as root, root.folder(_FOLDER) as folder:
                return frozenset(int(name) for name in _held_names(folder))
        except FileNotFoundError:
            return frozenset()
        except OSError as error:
            raise volume_error(error, f"cannot list {self._volume}/{_FOLDER}") from error

    def holders(self) -> frozenset[int]:
        """Return the process ids of those that hold the locks, as far as this process sees them. Never raises."""
        try:
            with open_volume(self._volume) as root, root.folder(_FOLDER) as folder:
                found = [_holder(folder, entry.name) for entry in folder.entries() if _RANK.fullmatch(entry.name)]
        except OSError:
            return frozenset()
        # 0 and less are no process that is seen here.
        return frozenset(process_id for process_id in found if process_id is not None and process_id > 1)

    def step(self, local_rank: int) -> StepRecord | None:
        """Return which step this rank says that it is at; None if it says nothing that makes sense. Never raises."""
        try:
            with open_volume(self._volume) as root, root.folder(_FOLDER) as folder:
                return decode(folder.read(f"{local_rank}{SUFFIX}", SIZE_BYTES))
        except OSError:
            return None

    def ranks_with_steps(self) -> frozenset[int]:
        """Return the local ranks that have a step file, alive or not. Never raises."""
        try:
            with open_volume(self._volume) as root, root.folder(_FOLDER) as folder:
                names = [entry.name.removesuffix(SUFFIX) for entry in folder.entries() if entry.name.endswith(SUFFIX)]
        except OSError:
            return frozenset()
        return frozenset(int(name) for name in names if _RANK.fullmatch(name))

    def have_been_held(self) -> bool:
        """Whether a client of Keepstep's has ever run on this volume. Never raises."""
        try:
            with open_volume(self._volume) as root, root.folder(_FOLDER) as folder:
                return any(_RANK.fullmatch(entry.name) for entry in folder.entries())
        except OSError:
            return False

    def claimed_paths(self) -> frozenset[Path]:
        """Return what processes are about to announce, or were when they died. Never raises."""
        found: set[Path] = set()
        with suppress(OSError), open_volume(self._volume) as root, root.folder(_FOLDER) as folder:
            for entry in folder.entries():
                with suppress(OSError, ValueError, TypeError, RecursionError):
                    content = folder.read(entry.name, CLAIMS_BYTES) if _RANK.fullmatch(entry.name) else b""
                    found |= {self._volume / str(claim) for claim in (json.loads(content) if content else [])}
        return frozenset(found)

    def claim(self, checkpoint: Path) -> bool:
        """Whether a live process is about to announce the checkpoint at this path. Never raises."""
        try:
            with open_volume(self._volume) as root, root.folder(_FOLDER) as folder:
                return any(self._claims(folder, name, checkpoint) for name in _held_names(folder))
        except OSError:
            # Storing it twice is better than never.
            return False

    def _claims(self, folder: Folder, name: str, checkpoint: Path) -> bool:
        try:
            content = folder.read(name, CLAIMS_BYTES)
            claims = json.loads(content) if content else []
            return any(os.path.normpath(self._volume / str(claim)) == str(checkpoint) for claim in claims)
        except (OSError, ValueError, TypeError, RecursionError):
            # It may be in the middle of a write. The next look can read it.
            return True


def _held_names(folder: Folder) -> list[str]:
    names = [entry.name for entry in folder.entries() if _RANK.fullmatch(entry.name)]
    return [name for name in names if _holder(folder, name) is not None]


def _holder(folder: Folder, name: str) -> int | None:
    """Return the process id of the lock's holder; None if nobody holds it."""
    try:
        with folder.opened_file(name) as descriptor:
            return holder(descriptor)
    except FileNotFoundError:
        return None

"""Who else runs in this pod, read from /proc where its containers share one process namespace.

A process is another container's when its mounts are not ours, and a trainer's when it has our volume mounted. Both
stand in /proc/<pid>/mountinfo, which Linux shows of every process to everybody; /proc/<pid>/ns, which says the same
more simply, is kept from us where the trainer runs as another user or with more capabilities. Must not know what
follows from it.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mooring_agent.core.errors import ErrorKind, VolumeError

# Of a line in mountinfo: id, parent id, device, directory of that device, mount point.
_ID, _DEVICE, _DIRECTORY, _POINT = 0, 2, 3, 4
_FIELDS: Final = 5
# The sandbox's own process, as a rule, which runs as long as the pod and mounts nothing.
_PAUSE_PID: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbours:
    """`trainer`: another container uses the volume. `anybody`: there is a process of another container at all."""

    trainer: bool
    anybody: bool


class Neighbourhood:
    """The other processes of this pod. Raises VolumeError where our own mounts cannot be read."""

    def __init__(self, volume: Path, *, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        place = os.path.realpath(volume)
        try:
            ours = _mounts(proc / "self")
        except OSError as error:
            raise _unreadable(proc) from error
        covering = [mount for mount in ours if _covers(mount, place)]
        if not covering:
            raise VolumeError(
                ErrorKind.VOLUME_UNUSABLE,
                f"cannot tell who else uses {volume}: no mount of ours holds it",
                hint="mount the volume in trainer and agent alike",
            )
        # Of two on one mount point the later hides the earlier.
        self._volume = max(reversed(covering), key=lambda mount: len(_point(mount)))
        self._our_mounts = frozenset(mount[_ID] for mount in ours)
        self._last_seen: int | None = None

    @property
    def shared(self) -> bool:
        """Whether other containers' processes can be seen here: in a namespace of our own we would be process 1."""
        return os.getpid() != _PAUSE_PID

    def look(self) -> Neighbours:
        """Blocks for one small file per process, and for only one while a trainer lives on. Raises VolumeError."""
        if self._last_seen is not None and self._look_at(self._last_seen).trainer:
            return Neighbours(trainer=True, anybody=True)
        self._last_seen = None
        anybody = False
        for pid in self._pids():
            found = self._look_at(pid)
            anybody |= found.anybody
            if found.trainer:
                self._last_seen = pid
                break
        return Neighbours(trainer=self._last_seen is not None, anybody=anybody)

    def _pids(self) -> list[int]:
        try:
            pids = [int(entry.name) for entry in self._proc.iterdir() if entry.name.isdigit()]
        except OSError as error:
            raise _unreadable(self._proc) from error
        return [pid for pid in pids if pid != os.getpid()]

    def _look_at(self, pid: int) -> Neighbours:
        try:
            mounts = _mounts(self._proc / str(pid))
        except PermissionError:
            # A security module hides it. It may be the trainer, which is worse to leave than nobody is to wait for.
            return Neighbours(trainer=pid != _PAUSE_PID, anybody=pid != _PAUSE_PID)
        except OSError:
            # Gone, or dead and not yet buried.
            return Neighbours(trainer=False, anybody=False)
        theirs = [mount for mount in mounts if mount[_ID] not in self._our_mounts]
        wanted = self._volume[_DEVICE], self._volume[_DIRECTORY]
        trainer = any((mount[_DEVICE], mount[_DIRECTORY]) == wanted for mount in theirs)
        return Neighbours(trainer=trainer, anybody=trainer or (bool(theirs) and pid != _PAUSE_PID))


def _unreadable(proc: Path) -> VolumeError:
    return VolumeError(
        ErrorKind.VOLUME_UNUSABLE,
        f"cannot tell who else runs in this pod: {proc} cannot be read",
        hint="a sidecar that ends after its trainer needs /proc; a native sidecar needs nothing",
    )


def _mounts(process: Path) -> list[list[str]]:
    lines = (process / "mountinfo").read_text(errors="surrogateescape").splitlines()
    return [fields for line in lines if len(fields := line.split(" ")) > _FIELDS]


def _covers(mount: list[str], place: str) -> bool:
    point = _point(mount)
    return point == "/" or place == point or place.startswith(f"{point}/")


def _point(mount: list[str]) -> str:
    """The kernel writes blanks and backslashes of a path as octal numbers."""
    text = mount[_POINT]
    for code in ("040", "011", "012"):
        text = text.replace(f"\\{code}", chr(int(code, 8)))
    return text.replace("\\134", "\\")

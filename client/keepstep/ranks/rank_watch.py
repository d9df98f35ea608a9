"""What ends a wait for other ranks before its time: one of them is gone, or this process has a termination notice.

Ranks that share a volume see each other's liveness locks: one that lives may be writing, and is waited for until the
grace period is nearly over. Of any other rank nobody knows, so a notice gives it less.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from keepstep.operating_system import HAS_AGENTS
from keepstep_api import liveness_lock

_LOOK_SECONDS: Final = 1.0
"""How often the locks are looked at, while any thread waits."""


class RankWatch:
    """Which other ranks are gone, as far as this process sees it, and how long to wait for those that it cannot see.

    A rank is gone when its process held its liveness lock and has ended, in whatever way: it comes to no agreement any
    more. A rank whose lock this process did not see held is none of those: it has none, or the file system shows it to
    nobody.

    Args:
        locks: Where the other ranks of this volume hold theirs, by rank.
        others: How many other ranks there are.
        notice_seconds: How long to wait from now on because of a notice, if all other ranks are seen to live or not;
            None without one.
    """

    def __init__(
        self, locks: Mapping[int, Path], *, others: int, notice_seconds: Callable[[bool], float | None] = lambda _: None
    ) -> None:
        holders = {rank: (path, _holder(path)) for rank, path in locks.items()}
        self._holders = {rank: (path, held_by) for rank, (path, held_by) in holders.items() if held_by is not None}
        self._sees_all = len(self._holders) == others
        self._notice_seconds = notice_seconds
        self._gone: frozenset[int] = frozenset()
        self._look_at = 0.0

    def gone(self) -> Sequence[int]:
        """Return the ranks that are gone, in order. Looks at most once a second."""
        if time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + _LOOK_SECONDS
            self._gone |= {rank for rank, lock in self._holders.items() if rank not in self._gone and _is_gone(*lock)}
        return sorted(self._gone)

    def most_seconds(self) -> float | None:
        """Return how long to wait from now on; None for as long as without a notice."""
        return self._notice_seconds(self._sees_all)


def _is_gone(path: Path, held_by: int) -> bool:
    # A process that opens and closes its own lock file, to copy the volume, loses its lock and goes on.
    return _holder(path, otherwise=held_by) != held_by and (held_by <= 0 or _has_ended(held_by))


def _has_ended(process_id: int) -> bool:
    """Whether there is no such process, or it waits for its parent to take note of its end."""
    try:
        state = Path(f"/proc/{process_id}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state in "ZX"


def _holder(path: Path, *, otherwise: int | None = None) -> int | None:
    """Return the process id of the lock's holder, None if nobody holds it; `otherwise` if that cannot be asked."""
    if HAS_AGENTS:
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                return liveness_lock.holder(descriptor)
            finally:
                os.close(descriptor)
    return otherwise

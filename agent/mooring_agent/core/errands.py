"""Work that carries no part of a file: how much of it is under way at once, and whose turn is next.

A backlog of a thousand checkpoints would otherwise ask the store a thousand things in one breath, or have all threads
drop pins while the last save waits to be pinned. First come, first served; the newest checkpoint never waits.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from mooring_agent.core.work import Operation, WorkId

_RELEASES: Final = frozenset({Operation.RELEASE})
_REQUESTS: Final = frozenset({Operation.RECONCILE, Operation.WRITE_MANIFEST, Operation.COMMIT, Operation.ABANDON})
_RELEASES_AT_ONCE: Final = 4
_REQUESTS_AT_ONCE: Final = 16


@dataclass(slots=True)
class Errands:
    """Of one sort: at most `limit` are under way, and the saves that wait have a line."""

    operations: frozenset[Operation]
    limit: int
    busy: int = 0
    _line: deque[str] = field(default_factory=deque)
    _waiting: set[str] = field(default_factory=set)

    def wait(self, save: str) -> None:
        if save not in self._waiting:
            self._waiting.add(save)
            self._line.append(save)

    def next_saves(self) -> Iterator[str]:
        """Take out of the line whose turn it is; the caller begins their work before it asks for the next."""
        while self._line and self.busy < self.limit:
            save = self._line.popleft()
            self._waiting.discard(save)
            yield save


def errands() -> tuple[Errands, ...]:
    return Errands(_RELEASES, _RELEASES_AT_ONCE), Errands(_REQUESTS, _REQUESTS_AT_ONCE)


def errands_of(sorts: tuple[Errands, ...], work: WorkId) -> Errands | None:
    """The sort of a piece of work; None: a transfer or a stage, which have bounds of their own."""
    return next((sort for sort in sorts if work.operation in sort.operations), None)

"""Identifies a piece of work: what a command does and to what. Equal ids are the same work.

A command carries an id, the event that ends the command carries it back, and retries are counted by it.

`WorkLimit` limits work that carries no part of a file: otherwise a backlog of a thousand checkpoints would send a
thousand requests at once, or occupy all threads with unpinning while the last save waits to be pinned. It goes first
come, first served; the newest checkpoint never waits.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple


class Operation(StrEnum):
    """What can be in flight."""

    STAGE = "stage"
    RECONCILE = "reconcile"
    CREATE_UPLOAD = "create-upload"
    SEND_PART = "send-part"
    PUT_FILE = "put-file"
    PUT_PACK = "put-pack"
    COMPLETE_UPLOAD = "complete-upload"
    WRITE_MANIFEST = "write-manifest"
    COMMIT = "commit"
    RELEASE = "release"
    ABANDON = "abandon"
    PRUNE = "prune"


TRANSFERS = frozenset(
    {
        Operation.CREATE_UPLOAD,
        Operation.SEND_PART,
        Operation.PUT_FILE,
        Operation.PUT_PACK,
        Operation.COMPLETE_UPLOAD,
    }
)
"""Work that takes a place in the upload window."""

CANCELLABLE = frozenset({Operation.SEND_PART, Operation.PUT_FILE, Operation.PUT_PACK})
"""Transfers that may last. The others are short, and cancelling one would leave an upload that nobody knows."""

STAYS_HERE: Final = frozenset({Operation.STAGE, Operation.RELEASE})
"""Work on the volume alone, whatever the store does."""


class WorkId(NamedTuple):
    """`rank` is -1 and the others empty where they mean nothing.

    `number` and `upload` are the part's: a part of an upload that the store lost is other work than its successor. Or
    `number` is the pack's.
    """

    operation: Operation
    save: str
    rank: int = -1
    path: str = ""
    number: int = 0
    upload: str = ""


_RELEASES: Final = frozenset({Operation.RELEASE})
_REQUESTS: Final = frozenset({Operation.RECONCILE, Operation.WRITE_MANIFEST, Operation.COMMIT, Operation.ABANDON})
_RELEASES_AT_ONCE: Final = 4
_REQUESTS_AT_ONCE: Final = 16


@dataclass(slots=True)
class WorkLimit:
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


def work_limits() -> tuple[WorkLimit, ...]:
    return WorkLimit(_RELEASES, _RELEASES_AT_ONCE), WorkLimit(_REQUESTS, _REQUESTS_AT_ONCE)


def work_limit_of(sorts: tuple[WorkLimit, ...], work: WorkId) -> WorkLimit | None:
    """The sort of a piece of work; None: a transfer or a stage, which have bounds of their own."""
    return next((sort for sort in sorts if work.operation in sort.operations), None)

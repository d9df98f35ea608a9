"""Identifies a piece of work: what a command does and to what. Equal ids mean the same work.

A command carries the id, the event that ends the command carries it back, and retries are counted by it.

`WorkLimit` bounds work that carries no part of a file. Otherwise a backlog of a thousand checkpoints would send a
thousand requests at once, or occupy all threads with unpinning while the last save waits to be pinned. Saves wait in
line, first come, first served; the newest checkpoint never waits.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple

from keepstep_agent.core.policies.repeated_deaths import READING


class Operation(StrEnum):
    """The kinds of work that can be in flight."""

    STAGE = "stage"
    RECONCILE = "reconcile"
    CREATE_UPLOAD = "create-upload"
    SEND_PART = "send-part"
    PUT_FILE = "put-file"
    PUT_PACK = "put-pack"
    COMPLETE_UPLOAD = "complete-upload"
    CHECK_SENT = "check-sent"
    WRITE_MANIFEST = "write-manifest"
    COMMIT = "commit"
    RELEASE = "release"
    ABANDON = "abandon"
    PRUNE = "prune"
    ASK = "ask"
    # At the next start, it is what was under way as reading is at a start.
    RECALL = READING


_SENDS_BYTES: Final = frozenset({Operation.SEND_PART, Operation.PUT_FILE, Operation.PUT_PACK})

TRANSFERS: Final = _SENDS_BYTES | {Operation.CREATE_UPLOAD, Operation.COMPLETE_UPLOAD}
"""Work that takes a place in the upload window."""

CANCELLABLE: Final = _SENDS_BYTES | {Operation.ASK}
"""Work that may be stopped. Cancelling another transfer could leave an upload that the agent does not know."""

STAYS_HERE: Final = frozenset({Operation.STAGE, Operation.CHECK_SENT, Operation.RELEASE, Operation.RECALL})
"""Work on the volume that needs no store."""


class WorkId(NamedTuple):
    """Fields that do not apply are -1 (`rank`), 0 (`number`) or empty.

    `number` is that of the part or the pack, or how many ranks a manifest has. `upload` is the store's token of the
    part's multipart upload: if the store loses an upload, a part of the next one is other work.
    """

    operation: Operation
    save: str
    rank: int = -1
    path: str = ""
    number: int = 0
    upload: str = ""

    def is_same_work(self, other: "WorkId") -> bool:
        """Whether both do the same, if perhaps by another upload, or for more ranks of a manifest."""
        mine, its = self._replace(upload=""), other._replace(upload="")
        return mine == (its._replace(number=mine.number) if mine.operation is Operation.WRITE_MANIFEST else its)


_RELEASES: Final = frozenset({Operation.RELEASE})
_CHECKS: Final = frozenset({Operation.CHECK_SENT})
_REQUESTS: Final = frozenset({Operation.RECONCILE, Operation.WRITE_MANIFEST, Operation.COMMIT, Operation.ABANDON})
_RELEASES_AT_ONCE: Final = 4
_CHECKS_AT_ONCE: Final = 16
_REQUESTS_AT_ONCE: Final = 16


@dataclass(slots=True)
class WorkLimit:
    """Bounds the work of these operations: `limit` pieces run at once, and other saves wait in line."""

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
        """Take saves out of the line while there is capacity. The caller begins each one's work before it goes on."""
        while self._line and self.busy < self.limit:
            save = self._line.popleft()
            self._waiting.discard(save)
            yield save


def work_limits() -> tuple[WorkLimit, ...]:
    return (
        WorkLimit(_RELEASES, _RELEASES_AT_ONCE),
        WorkLimit(_CHECKS, _CHECKS_AT_ONCE),
        WorkLimit(_REQUESTS, _REQUESTS_AT_ONCE),
    )


def work_limit_of(sorts: tuple[WorkLimit, ...], work: WorkId) -> WorkLimit | None:
    """Return the limit for a piece of work; None for transfers, stages and prunes, which are bounded elsewhere."""
    return next((sort for sort in sorts if work.operation in sort.operations), None)

"""Identity of a piece of work: what a command does and to what. Equal ids are the same work.

A command carries one, the event that ends the command carries it back, and retries are counted by it.
"""

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

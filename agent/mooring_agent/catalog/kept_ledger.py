"""Keeps a run's ledger in little memory from one look to the next, so that each look reads only new objects.

What was read is compressed at once, and merged as `mooring prune` does it. Invariants: an object is read once, unless
nothing of what was read is listed any more; memory is bounded, and what is left out because of that is counted.
"""

import asyncio
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from mooring_agent.catalog.ledger import REFUSALS, decode_object, newest_objects
from mooring_agent.catalog.object_reads import for_each, if_there, read_object
from mooring_agent.core.errors import ErrorKind, StoreError
from mooring_agent.core.limits import LEDGER_BYTES
from mooring_agent.core.stored.ledger import AgentLife, decode_lives, joined_lives, merged
from mooring_agent.ports import StoreReader

MOST_BYTES: Final = 2 * LEDGER_BYTES
"""How much of one ledger is read: the newest objects. They take several times as much while they are decoded."""
_PIECE_BYTES: Final = LEDGER_BYTES // 4
_SMALL_BYTES: Final = 64 * 1024
"""What is larger is compressed in a thread."""
_READS_AT_ONCE: Final = 4


@dataclass(frozen=True, slots=True)
class Piece:
    """An object as agents or a merge write it, compressed."""

    packed: bytes
    size_bytes: int

    @classmethod
    def of(cls, body: bytes) -> "Piece":
        return cls(zlib.compress(body, 6), len(body))

    @property
    def body(self) -> bytes:
        return zlib.decompress(self.packed)


class KeptLedger:
    """The ledger of one run."""

    def __init__(self) -> None:
        self._left_out = 0
        self._dropped = 0
        self._pieces: list[Piece] = []
        self._read: frozenset[int] = frozenset()
        self._unreadable: frozenset[int] = frozenset()
        self._listed: frozenset[int] | None = None
        self._forgotten = False

    @property
    def unread(self) -> int:
        """How many objects, or merged pieces, could not be read or are too many."""
        return len(self._unreadable) + self._left_out + self._dropped

    @property
    def kept_bytes(self) -> int:
        return sum(len(piece.packed) for piece in self._pieces)

    async def fetch(self, store: StoreReader, run: str, *, needed: bool) -> tuple[Piece, ...] | None:
        """List the ledger and read what is new, for `add`. None if nothing has changed. `run` is the run's prefix.

        `needed`: `lives` will be called also if nothing has changed, so what was forgotten is read again.
        """
        keys, self._left_out = await newest_objects(store, run, most_bytes=MOST_BYTES)
        # A key takes a hundred bytes, its hash a third: there may be thousands of each run.
        hashes = {hash(key): key for key in reversed(keys)}
        if self._listed == hashes.keys() and not (needed and self._forgotten):
            return None
        if not self._read & hashes.keys():
            self.forget()
        found: list[Piece] = []
        unreadable, gone = set(self._unreadable & hashes.keys()), set[int]()

        async def read(key: str) -> None:
            try:
                body = await if_there(read_object(store, key, _checked, limit_bytes=LEDGER_BYTES))
            except StoreError as error:
                if error.kind not in REFUSALS and error.kind is not ErrorKind.CHECKPOINT_CORRUPT:
                    raise
                unreadable.add(hash(key))
                return
            if body is None:
                gone.add(hash(key))
            elif len(body) < _SMALL_BYTES:
                found.append(Piece.of(body))
            else:
                found.append(await asyncio.to_thread(Piece.of, body))

        wanted = [key for number, key in hashes.items() if number not in self._read and number not in unreadable]
        await for_each(wanted, read, at_once=_READS_AT_ONCE)
        self._unreadable = frozenset(unreadable)
        self._forgotten = False
        # What was merged while we read is in an object that the next listing shows.
        self._read = self._listed = frozenset(hashes) - gone
        return tuple(found)

    def add(self, found: Sequence[Piece]) -> None:
        """Add what `fetch` has returned. Takes processor time in proportion to it."""
        small = [piece for piece in found if piece.size_bytes < _PIECE_BYTES]
        self._pieces += [piece for piece in found if piece.size_bytes >= _PIECE_BYTES]
        if small and self._pieces and self._pieces[-1].size_bytes < _PIECE_BYTES:
            small.insert(0, self._pieces.pop())
        for group in _groups(small):
            self._pieces += _merged(group)
        while len(self._pieces) > 1 and sum(piece.size_bytes for piece in self._pieces) > MOST_BYTES:
            del self._pieces[0]
            self._dropped += 1

    def lives(self) -> tuple[AgentLife, ...]:
        """Return what is kept, decoded."""
        return joined_lives(life for piece in self._pieces for life in decode_lives(piece.body))

    def forget(self) -> None:
        """Free the memory. When it is needed again, or changes, all of it is read again."""
        self._forgotten = True
        self._pieces, self._read, self._unreadable, self._dropped = [], frozenset(), frozenset(), 0


def _checked(body: bytes, key: str) -> bytes:
    decode_object(body, key)
    return body


def _groups(pieces: Sequence[Piece]) -> list[list[Piece]]:
    groups: list[list[Piece]] = [[]]
    size_bytes = 0
    for piece in pieces:
        if size_bytes + piece.size_bytes > _PIECE_BYTES:
            groups.append([])
            size_bytes = 0
        groups[-1].append(piece)
        size_bytes += piece.size_bytes
    return [group for group in groups if group]


def _merged(group: Sequence[Piece]) -> Sequence[Piece]:
    """Merge pieces into one. Those that cannot be merged stay as they are."""
    whole = merged([piece.body for piece in group]) if len(group) > 1 else None
    return group if whole is None else [Piece.of(whole)]

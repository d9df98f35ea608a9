"""Keeps a run's ledger in little memory from one look to the next, so that each look reads only new objects.

What was read is compressed at once, and merged as `keepstep prune` does it. Invariants: an object is read once, unless
nothing of what was read is listed any more; memory is bounded, and what is left out because of that is counted.
"""

import asyncio
import zlib
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Final

from keepstep_agent.catalog.ledger import decode_object, newest_objects
from keepstep_agent.catalog.object_reads import READ_REFUSALS, for_each, if_there, read_object
from keepstep_agent.core.errors import ErrorKind, StoreError
from keepstep_agent.core.limits import LEDGER_BYTES
from keepstep_agent.core.stored.ledger import AgentLife, decode_lives, joined_lives, merged
from keepstep_agent.ports import StoreReader

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
        self._damaged: Set[int] = frozenset()
        self._refused: Set[int] = frozenset()
        self._refusal = ""
        self._listed: frozenset[int] | None = None
        self._forgotten = False

    @property
    def unread(self) -> int:
        """How many objects, or merged pieces, could not be read or are too many."""
        return len(self._damaged) + len(self._refused) + self._left_out + self._dropped

    @property
    def refusal(self) -> str:
        """One of the store's answers to what it refuses; empty if it refuses nothing."""
        return self._refusal

    @property
    def kept_bytes(self) -> int:
        return sum(len(piece.packed) for piece in self._pieces)

    async def fetch(self, store: StoreReader, run: str, *, needed: bool) -> tuple[Piece, ...] | None:
        """List the ledger and read what is new, for `add`. None if nothing has changed. `run` is the run's prefix.

        `needed`: `lives` will be called also if nothing has changed, so what was forgotten is read again.
        """
        keys, self._left_out = await newest_objects(store, run, most_bytes=MOST_BYTES)
        # A key takes a hundred bytes, its hash a third: there may be thousands of each run.
        listed = {hash(key): key for key in reversed(keys)}
        if self._listed == listed.keys() and not self._refused and not (needed and self._forgotten):
            return None
        if self._read and not self._read & listed.keys():
            self.forget()
        unread = [key for number, key in listed.items() if number not in self._read]
        refused = [key for key in unread if hash(key) in self._refused]
        looking = _Look(store)
        # One tells whether the store still refuses what it has refused: somebody may have changed its policy.
        await looking.read(refused[-1:])
        still = {hash(key) for key in refused} if looking.refused else set()
        await looking.read(key for key in unread if hash(key) not in still and key not in refused[-1:])
        self._refused = looking.refused | still
        self._damaged = (self._damaged & listed.keys()) | looking.damaged
        self._refusal = looking.refusal if self._refused else ""
        changed = bool(looking.found) or self._listed != listed.keys() or self._forgotten
        self._forgotten = False
        # What was merged while we read is in an object that the next listing shows.
        self._listed = frozenset(listed) - looking.gone
        self._read = self._listed - self._refused
        return tuple(looking.found) if changed else None

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
        self._pieces, self._read, self._damaged, self._dropped = [], frozenset(), frozenset(), 0


class _Look:
    """What one look at a ledger reads. `damaged`, `refused` and `gone` are hashes of keys."""

    def __init__(self, store: StoreReader) -> None:
        self.found: list[Piece] = []
        self.damaged: set[int] = set()
        self.refused: set[int] = set()
        self.refusal = ""
        self.gone: set[int] = set()
        self._store = store

    async def read(self, keys: Iterable[str]) -> None:
        await for_each(keys, self._read_one, at_once=_READS_AT_ONCE)

    async def _read_one(self, key: str) -> None:
        try:
            body = await if_there(read_object(self._store, key, _checked, limit_bytes=LEDGER_BYTES))
        except StoreError as error:
            if error.kind in READ_REFUSALS:
                self.refused.add(hash(key))
                self.refusal = str(error)
            elif error.kind is ErrorKind.CHECKPOINT_CORRUPT:
                self.damaged.add(hash(key))
            else:
                raise
            return
        if body is None:
            self.gone.add(hash(key))
        elif len(body) < _SMALL_BYTES:
            self.found.append(Piece.of(body))
        else:
            self.found.append(await asyncio.to_thread(Piece.of, body))


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

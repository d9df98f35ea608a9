"""What is wanted of one checkpoint, in which order it is fetched, and who waits for it.

What somebody has asked for comes before what is only a guess. Each caller waits for its own pieces: one that arrives
costs a step for each caller, however many pieces they wait for. Does no I/O.
"""

import asyncio
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from keepstep_agent.core.errors import ErrorKind, KeepstepError, RequestError
from keepstep_agent.core.policies.restore_choice import CommittedSave
from keepstep_agent.restore.partial_copy import PartialCopy
from keepstep_agent.restore.pieces import PieceSet, joined

_WAITING: Final = 64
"""How many calls may wait at once. A pod has a rank for each of its accelerators."""


class Request:
    """One call that waits for pieces, of which so many are missing."""

    def __init__(self, pieces: Sequence[range], missing: int) -> None:
        self._pieces = joined(pieces)
        self._missing = missing
        self.settled = asyncio.Event()
        """All of them are here, or never will be."""
        self._settle()

    def arrived(self, piece: int) -> None:
        """Count a piece that was missing so far, if it is among those that this call waits for."""
        position = bisect_right(self._pieces, piece, key=lambda one: one.start) - 1
        if position >= 0 and piece in self._pieces[position]:
            self._missing -= 1
            self._settle()

    def _settle(self) -> None:
        if not self._missing:
            self.settled.set()


class Fetch:
    """The fetch of one checkpoint. `failure`: it cannot be had, or the fetch was ended."""

    def __init__(self, committed: CommittedSave) -> None:
        self.committed = committed
        self._copy: PartialCopy | None = None
        self.failure: KeepstepError | None = None
        self.storage_error = ""
        self.is_asked_for = False
        self.is_superseded = False
        self.announced_since: set[str] = set()
        """Saves that were announced since somebody has asked for this checkpoint."""
        self.wanted_bytes = 0
        self.done_bytes = 0
        self._asked, self._arrived = PieceSet(0), PieceSet(0)
        self._wanted: deque[range] = deque()
        self._guessed: deque[range] = deque()
        self._guesses_on_their_way: set[int] = set()
        self._requests: list[Request] = []
        # Each of these is set once; `_work` whenever there is something to fetch.
        self.loaded = asyncio.Event()
        self.wants_place = asyncio.Event()
        self.settled = asyncio.Event()
        self._guess_is_over = asyncio.Event()
        self._work = asyncio.Event()

    @property
    def copy(self) -> PartialCopy | None:
        return self._copy

    def load(self, copy: PartialCopy) -> None:
        """Set what the checkpoint consists of."""
        self._copy = copy
        self._asked, self._arrived = PieceSet(len(copy.pieces)), PieceSet(len(copy.pieces))
        self.loaded.set()

    def not_asked(self, pieces: Sequence[range]) -> list[range]:
        """Return those of the pieces that nobody has asked for."""
        return list(self._asked.missing(pieces))

    def ask(self, pieces: Sequence[range]) -> None:
        """Have the pieces fetched, before everything that is a guess."""
        assert self._copy is not None
        new = self.not_asked(pieces)
        absent = self._copy.missing(new)
        for one in new:
            self._asked.add(one)
            self._arrived.add(one)
        for one in absent:
            self._arrived.discard(one)
        new_bytes = self._copy.pieces.size_bytes(new)
        self.wanted_bytes += new_bytes
        self.done_bytes += new_bytes - self._copy.pieces.size_bytes(absent)
        self._wanted.extend(absent)
        self._work.set()

    @contextmanager
    def waiting(self, pieces: Sequence[range]) -> Iterator[Request]:
        """Give what tells when all of these pieces are here, which were asked for and come once each.

        Raises RequestError if too many calls wait.
        """
        if len(self._requests) >= _WAITING:
            raise RequestError(
                ErrorKind.BAD_REQUEST, f"{_WAITING} calls of Fetch wait already", hint="let one process ask for a pod"
            )
        request = Request(pieces, sum(map(len, self.absent(pieces))))
        if self.failure is not None:
            request.settled.set()
        self._requests.append(request)
        try:
            yield request
        finally:
            self._requests.remove(request)

    def absent(self, pieces: Sequence[range]) -> list[range]:
        """Return those of the pieces that have not arrived."""
        return list(self._arrived.missing(pieces))

    def guess(self, pieces: Sequence[range]) -> asyncio.Event:
        """Have the pieces fetched after all that is asked for. The event: all are here, or nobody wants them."""
        self._guess_is_over.clear()
        if self.failure is not None:
            self._guess_is_over.set()
        self._guessed.extend(pieces)
        self._work.set()
        return self._guess_is_over

    def forget_guess(self) -> None:
        self._guessed.clear()
        self._guess_is_over.set()

    def is_asked(self, piece: int) -> bool:
        """Whether somebody waits for the piece; if not, it is only a guess."""
        return piece in self._asked

    @property
    def is_busy(self) -> bool:
        return self._copy is None or bool(self._guessed) or self.done_bytes < self.wanted_bytes

    async def next_piece(self) -> int:
        while True:
            for queue in (self._wanted, self._guessed):
                if queue:
                    first = queue.popleft()
                    if len(first) > 1:
                        queue.appendleft(first[1:])
                    if queue is self._guessed:
                        self._guesses_on_their_way.add(first[0])
                    return first[0]
            self._work.clear()
            await self._work.wait()

    def arrived(self, piece: int) -> None:
        assert self._copy is not None
        self._guesses_on_their_way.discard(piece)
        if not self._guessed and not self._guesses_on_their_way:
            self._guess_is_over.set()
        if piece in self._arrived:
            return
        self._arrived.add(range(piece, piece + 1))
        if piece in self._asked:
            self.done_bytes += self._copy.pieces.size_bytes([range(piece, piece + 1)])
        for request in self._requests:
            request.arrived(piece)

    def all_arrived(self) -> None:
        """The whole checkpoint is in its place."""
        assert self._copy is not None
        for one in self.absent([self._copy.all_pieces()]):
            for piece in one:
                self.arrived(piece)

    def fail(self, error: KeepstepError) -> None:
        if self.failure is None:
            self.failure = error
        self.loaded.set()
        self.settled.set()
        self._guess_is_over.set()
        for request in self._requests:
            request.settled.set()

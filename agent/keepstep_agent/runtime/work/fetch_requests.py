"""What is wanted of one checkpoint, in which order it is fetched, and who waits for it.

What somebody has asked for comes before what is only a guess. Each caller waits for its own pieces: one that arrives
costs a step for each caller, however many pieces they wait for. Does no I/O.
"""

import asyncio
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final

from keepstep_agent.core.errors import ErrorKind, KeepstepError, RequestError
from keepstep_agent.core.policies.restore_choice import CommittedSave
from keepstep_agent.restore.partial_copy import PartialCopy, Piece

_WAITING: Final = 64
"""How many calls may wait at once. A pod has a rank for each of its accelerators."""


class Request:
    """One call that waits for pieces."""

    def __init__(self, missing: Iterable[Piece]) -> None:
        self.missing = set(missing)
        self.settled = asyncio.Event()
        """All of them are here, or never will be."""
        if not self.missing:
            self.settled.set()


class Fetch:
    """The fetch of one checkpoint. `failure`: it cannot be had, or the fetch was ended."""

    def __init__(self, committed: CommittedSave) -> None:
        self.committed = committed
        self.copy: PartialCopy | None = None
        self.failure: KeepstepError | None = None
        self.storage_error = ""
        self.is_asked_for = False
        self.is_superseded = False
        self.announced_since: set[str] = set()
        """Saves that were announced since somebody has asked for this checkpoint."""
        self.wanted_bytes = 0
        self.done_bytes = 0
        self._asked: set[Piece] = set()
        self._arrived: set[Piece] = set()
        self._wanted: deque[Piece] = deque()
        self._guessed: deque[Piece] = deque()
        self._requests: list[Request] = []
        # Each of these is set once; `_work` whenever there is something to fetch.
        self.loaded = asyncio.Event()
        self.wants_place = asyncio.Event()
        self.settled = asyncio.Event()
        self._work = asyncio.Event()

    def ask(self, pieces: Iterable[Piece]) -> None:
        """Have the pieces fetched, before everything that is a guess."""
        assert self.copy is not None
        for piece in pieces:
            if piece not in self._asked:
                self._asked.add(piece)
                self._wanted.append(piece)
                self.wanted_bytes += self.copy.size_bytes(piece)
                self.done_bytes += self.copy.size_bytes(piece) if piece in self._arrived else 0
        self._work.set()

    @contextmanager
    def waiting(self, pieces: Iterable[Piece]) -> Iterator[Request]:
        """Give what tells when all of them are here. Raises RequestError if too many calls wait."""
        assert self.copy is not None
        if len(self._requests) >= _WAITING:
            raise RequestError(
                ErrorKind.BAD_REQUEST, f"{_WAITING} calls of Fetch wait already", hint="let one process ask for a pod"
            )
        request = Request(piece for piece in pieces if not self.copy.has(piece))
        self._requests.append(request)
        try:
            yield request
        finally:
            self._requests.remove(request)

    def guess(self, pieces: Iterable[Piece]) -> None:
        self._guessed.extend(pieces)
        self._work.set()

    def forget_guess(self) -> None:
        self._guessed.clear()

    def is_asked(self, piece: Piece) -> bool:
        """Whether somebody waits for the piece; if not, it is only a guess."""
        return piece in self._asked

    @property
    def is_busy(self) -> bool:
        return self.copy is None or bool(self._guessed) or self.done_bytes < self.wanted_bytes

    async def next_piece(self) -> Piece:
        while True:
            for queue in (self._wanted, self._guessed):
                if queue:
                    return queue.popleft()
            self._work.clear()
            await self._work.wait()

    def arrived(self, piece: Piece) -> None:
        assert self.copy is not None
        if piece not in self._arrived:
            self._arrived.add(piece)
            self.done_bytes += self.copy.size_bytes(piece) if piece in self._asked else 0
        for request in self._requests:
            request.missing.discard(piece)
            if not request.missing:
                request.settled.set()

    def fail(self, error: KeepstepError) -> None:
        if self.failure is None:
            self.failure = error
        self.loaded.set()
        self.settled.set()
        for request in self._requests:
            request.settled.set()

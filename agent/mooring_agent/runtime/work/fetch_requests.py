"""What is wanted of one checkpoint, in which order it is fetched, and who waits for it.

What somebody has asked for comes before what is only a guess. Each caller waits for its own pieces: one that arrives
costs a step for each caller, however many pieces they wait for. Does no I/O.
"""

import asyncio
from collections import deque
from collections.abc import Iterable

from mooring_agent.core.errors import MooringError
from mooring_agent.core.policies.restore_choice import CommittedSave
from mooring_agent.restore.partial_copy import PartialCopy, Piece


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
        self.failure: MooringError | None = None
        self.storage_error = ""
        self.asked: dict[Piece, None] = {}
        self.wanted: deque[Piece] = deque()
        self.guessed: deque[Piece] = deque()
        self.requests: list[Request] = []
        self.is_superseded = False
        # Each of these is set once; `work` whenever there is something to fetch.
        self.loaded = asyncio.Event()
        self.wants_place = asyncio.Event()
        self.settled = asyncio.Event()
        self.work = asyncio.Event()

    def ask(self, pieces: Iterable[Piece]) -> Request:
        """Have the pieces fetched, before everything that is a guess."""
        assert self.copy is not None
        pieces = list(pieces)
        for piece in pieces:
            if piece not in self.asked:
                self.asked[piece] = None
                self.wanted.append(piece)
        self.work.set()
        request = Request(piece for piece in pieces if not self.copy.has(piece))
        self.requests.append(request)
        return request

    async def next_piece(self) -> Piece:
        while True:
            for queue in (self.wanted, self.guessed):
                if queue:
                    return queue.popleft()
            self.work.clear()
            await self.work.wait()

    def arrived(self, piece: Piece) -> None:
        for request in self.requests:
            request.missing.discard(piece)
            if not request.missing:
                request.settled.set()

    def fail(self, error: MooringError) -> None:
        if self.failure is None:
            self.failure = error
        self.loaded.set()
        self.settled.set()
        for request in self.requests:
            request.settled.set()

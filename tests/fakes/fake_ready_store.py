"""What the agent's watchers are given beside a store: when it is open, and the time."""

import asyncio

from tests.fakes.fake_store import FakeStore


class FakeReadyStore:
    """A `ReadyStore` of one that is there already, or as soon as `opened` is set."""

    def __init__(self, store: FakeStore) -> None:
        self._store = store
        self.asked, self.opened = asyncio.Event(), asyncio.Event()
        self.opened.set()

    async def get(self) -> FakeStore:
        self.asked.set()
        await self.opened.wait()
        return self._store


class StoreClock:
    """A node's clock, behind the store's by so much."""

    def __init__(self, store: FakeStore, *, behind_seconds: float = 0.0) -> None:
        self._store = store
        self._behind_seconds = behind_seconds

    def now(self) -> float:
        return self._store.now - self._behind_seconds

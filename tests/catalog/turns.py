"""Several processes and one store, of which one request at a time gets through: the order is a matter of chance."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Final

from tests.fakes.memory_store import MemoryStore

from keepstep_agent.ports import ObjectInfo

_DAY: Final = 24 * 3600.0


class Turns:
    """Lets one request of all tasks through at a time, chosen at random, and kills tasks.

    `check_all` is called after each request. Whoever's name begins with one of `impatient` never takes two days: it is
    killed when so much time passes.
    """

    def __init__(
        self, seed: int, store: MemoryStore, check_all: Callable[[], None], *, impatient: tuple[str, ...]
    ) -> None:
        self.random = random.Random(seed)
        self.store = store
        self._check_all = check_all
        self._impatient = impatient
        self._waiting: list[tuple[asyncio.Future[None], str]] = []
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def turn(self, who: str) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((future, who))
        await future

    async def run(self, work: dict[str, Callable[[], Coroutine[Any, Any, None]]], *, steps: int) -> None:
        """Each piece of work begins again whenever it has ended or was killed."""
        for _ in range(steps):
            for who, begin in work.items():
                if who not in self._tasks or self._tasks[who].done():
                    self._end(who)
                    self._tasks[who] = asyncio.create_task(begin())
            await self._settled()
            self._waiting = [(future, who) for future, who in self._waiting if not future.done()]
            if not self._waiting:
                continue
            position = self.random.randrange(len(self._waiting))
            future, who = self._waiting.pop(position)
            acts = self.random.random() > 0.003
            if acts:
                future.set_result(None)
                await self._settled()
            if self.random.random() < 0.005 or not acts:
                await self._kill(who)
            self.store.now += self.random.choice([0.1, 1, 10])
            if self.random.random() < 0.005:
                for impatient in [who for who in work if who.startswith(self._impatient)]:
                    await self._kill(impatient)
                self.store.now += 2 * _DAY
            self._check_all()
        for who in work:
            await self._kill(who)

    async def _kill(self, who: str) -> None:
        if task := self._tasks.get(who):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        self._end(who)

    def _end(self, who: str) -> None:
        """Work that fails is a bug of the test or of the prune."""
        task = self._tasks.pop(who, None)
        if task and not task.cancelled() and (error := task.exception()):
            raise error

    async def _settled(self) -> None:
        """Until every task waits for its turn or has ended."""
        for _ in range(12):
            await asyncio.sleep(0)


class TurnStore(MemoryStore):
    """One process's view of the store. A listing takes two requests, as one of many pages does."""

    def __init__(self, shared: MemoryStore, turns: Turns, who: str) -> None:
        super().__init__()
        self.objects = shared.objects
        self._shared = shared
        self._turns = turns
        self._who = who

    async def _turn(self) -> None:
        await self._turns.turn(self._who)
        self.now = self._shared.now

    async def put(self, key: str, body: bytes, *, if_absent: bool = False) -> None:
        await self._turn()
        await super().put(key, body, if_absent=if_absent)

    async def delete(self, key: str) -> None:
        await self._turn()
        await super().delete(key)

    async def head(self, key: str) -> ObjectInfo:
        await self._turn()
        return await super().head(key)

    async def get(self, key: str, *, limit_bytes: int, fresh: bool = False) -> bytes:
        await self._turn()
        return await super().get(key, limit_bytes=limit_bytes, fresh=fresh)

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        await self._turn()
        keys = sorted(self.objects)
        middle = keys[self._turns.random.randrange(len(keys))] if keys else ""
        first = [one async for one in super().list(prefix) if one.key <= middle]
        await self._turn()
        rest = [one async for one in super().list(prefix) if one.key > middle]
        for one in first + rest:
            yield one

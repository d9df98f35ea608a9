"""Snapshots, prunes and crashes in random order: no committed snapshot ever lacks an object.

The real prunes, of everything and of the newest alone, and the real reservation run over a store that lets one request
through at a time. tests/model has the protocol itself, searched exhaustively; this finds where the code differs.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest
from tests.catalog.stored_snapshots import commit, output, snapshot_id, snapshot_info, snapshot_of
from tests.fakes.memory_store import MemoryStore

from mooring_agent.catalog.deep_check import check
from mooring_agent.catalog.markers import list_snapshots
from mooring_agent.catalog.pruning import prune
from mooring_agent.catalog.recent_pruning import prune_recent
from mooring_agent.core.errors import ErrorKind, StoreError
from mooring_agent.core.model import RankManifest
from mooring_agent.core.policies.retention.horizon import Horizon
from mooring_agent.core.settings.values import RetentionSettings
from mooring_agent.core.stored.manifest import encode_manifest
from mooring_agent.core.stored.object_layout import manifest_key, marker_key, object_key
from mooring_agent.ports import ObjectInfo
from mooring_agent.runtime.work.duplicate_save_guard import reserve_base

DAY = 24 * 3600.0
_SEEDS_PER_TEST = 15


class _Turns:
    """Lets one request of all tasks through at a time, chosen at random, and kills tasks."""

    def __init__(self, seed: int, store: MemoryStore, check_all: Callable[[], None]) -> None:
        self.random = random.Random(seed)
        self.store = store
        self._check_all = check_all
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
                # No prune takes so long, but a node may be away for as long as that.
                for pruner in [who for who in work if who.startswith("prune")]:
                    await self._kill(pruner)
                self.store.now += 2 * DAY
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


class _TurnStore(MemoryStore):
    """One process's view of the store. A listing takes two requests, as one of many pages does."""

    def __init__(self, shared: MemoryStore, turns: _Turns, who: str) -> None:
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


class _Node:
    """An agent that takes snapshots of its output directory, each based on one of its last."""

    def __init__(self, store: MemoryStore, turns: _Turns, series: str, known: dict[str, RankManifest]) -> None:
        self._store = store
        self._random = turns.random
        self.series = series
        self._known = known
        self._number = 0
        self._versions = dict.fromkeys("abc", 0)
        self._committed: list[RankManifest] = []
        self._base: RankManifest | None = None
        self._decided: tuple[RankManifest, dict[str, bytes]] | None = None

    async def run(self) -> None:
        """One snapshot, or the rest of it after a crash."""
        if self._decided is None:
            self._number += 1
            for name in self._versions:
                self._versions[name] += self._random.random() < 0.4
            # Not always the newest, which no prune deletes: a volume may come back, or be restored from an older one.
            self._base = self._random.choice([*self._committed[-3:], None])
        info = snapshot_info(self._number, series=self.series)
        base = self._base
        if base is not None:
            try:
                await reserve_base(self._store, info, snapshot_id(base))
            except StoreError as error:
                if error.kind is not ErrorKind.BASE_PRUNED:
                    raise
                # Given up, if it has decided to share; the next one is complete.
                base = None
                if self._decided is not None:
                    self._decided = None
                    return
        if self._decided is None:
            self._decided = snapshot_of(info, output(**self._versions), base=base)
        manifest, objects = self._decided
        for key, body in objects.items():
            await self._store.put(key, body)
        await self._store.put(manifest_key(info, 0, 1), encode_manifest([manifest]))
        self._known[marker_key(info)] = manifest
        await commit(self._store, manifest)
        self._committed.append(manifest)
        self._decided = None


async def _simulate(seed: int) -> int:
    """Return how many snapshots were deleted."""
    shared = MemoryStore()
    known: dict[str, RankManifest] = {}
    markers: set[str] = set()

    def check_all() -> None:
        markers.update(key for key in known if key in shared.objects)
        for key, manifest in known.items():
            if key in shared.objects:
                keys = {object_key(manifest.info, 0, file) for file in manifest.files} | {
                    manifest_key(manifest.info, 0, 1)
                }
                assert keys <= shared.objects.keys(), (seed, key, keys - shared.objects.keys())

    turns = _Turns(seed, shared, check_all)
    nodes = [_Node(_TurnStore(shared, turns, series), turns, series, known) for series in ("node-0", "node-1")]

    def pruner(who: str) -> Callable[[], Coroutine[Any, Any, None]]:
        async def work() -> None:
            settings = RetentionSettings(keep_last=turns.random.choice([1, 1, 2]))
            store = _TurnStore(shared, turns, who)
            series = turns.random.choice(["", *(node.series for node in nodes)])
            if series:
                await prune_recent(store, settings, Horizon(), series={series}, now=shared.now)
            else:
                await prune(store, settings, now=shared.now)

        return work

    work: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {
        "node-0": nodes[0].run,
        "node-1": nodes[1].run,
        "prune-0": pruner("prune-0"),
        "prune-1": pruner("prune-1"),
    }
    await turns.run(work, steps=800)
    await _all_are_whole(shared)
    return len(markers - shared.objects.keys())


async def _all_are_whole(store: MemoryStore) -> None:
    for snapshots in (await list_snapshots(store)).values():
        for one in snapshots:
            assert await check(store, one) == ()


@pytest.mark.parametrize("first", range(0, 30, _SEEDS_PER_TEST))
async def test_whatever_the_order_of_requests_no_committed_snapshot_lacks_an_object(first: int) -> None:
    deleted = [await _simulate(seed) for seed in range(first, first + _SEEDS_PER_TEST)]
    assert sum(deleted) > 2 * _SEEDS_PER_TEST

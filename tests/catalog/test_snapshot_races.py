"""Snapshots, prunes and crashes in random order: no committed snapshot ever lacks an object.

The real prunes, of everything and of the newest alone, and the real reservation run over a store that lets one request
through at a time. tests/model has the protocol itself, searched exhaustively; this finds where the code differs.
"""

from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from tests.catalog.stored_snapshots import commit, output, snapshot_id, snapshot_info, snapshot_of
from tests.catalog.turns import Turns, TurnStore
from tests.fakes.memory_store import MemoryStore
from tests.lanes import nightly

from keepstep_agent.catalog.deep_check import check
from keepstep_agent.catalog.markers import list_snapshots
from keepstep_agent.catalog.pruning import prune
from keepstep_agent.catalog.recent_pruning import prune_recent
from keepstep_agent.core.errors import ErrorKind, StoreError
from keepstep_agent.core.model import RankManifest
from keepstep_agent.core.policies.retention.horizon import Horizon
from keepstep_agent.core.settings.values import RetentionSettings
from keepstep_agent.core.stored.manifest import encode_manifest
from keepstep_agent.core.stored.object_layout import manifest_key, marker_key, object_key
from keepstep_agent.runtime.work.duplicate_save_guard import reserve_base

_SEEDS_PER_TEST = 6


class _Node:
    """An agent that takes snapshots of its output directory, each based on one of its last."""

    def __init__(self, store: MemoryStore, turns: Turns, series: str, known: dict[str, RankManifest]) -> None:
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

    # No prune takes two days, but a node may be away for as long as that.
    turns = Turns(seed, shared, check_all, impatient=("prune",))
    nodes = [_Node(TurnStore(shared, turns, series), turns, series, known) for series in ("node-0", "node-1")]

    def pruner(who: str) -> Callable[[], Coroutine[Any, Any, None]]:
        async def work() -> None:
            settings = RetentionSettings(
                keep_last=turns.random.choice([1, 1, 2]),
                keep_every_seconds=turns.random.choice([0, 0, 1000.0]),
                keep_daily=turns.random.choice([0, 0, 2]),
            )
            store = TurnStore(shared, turns, who)
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


@pytest.mark.parametrize("first", [0, *nightly(*range(_SEEDS_PER_TEST, 30, _SEEDS_PER_TEST))])
async def test_whatever_the_order_of_requests_no_committed_snapshot_lacks_an_object(first: int) -> None:
    deleted = [await _simulate(seed) for seed in range(first, first + _SEEDS_PER_TEST)]
    assert sum(deleted) > 2 * _SEEDS_PER_TEST

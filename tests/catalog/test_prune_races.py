"""Saves, restores and prunes of announced checkpoints at the same time, under all policies, and with crashes.

First in random order: the real prunes and what restore asks of a store get one request through at a time. Then at every
moment: a real restore during which the destination moves on, and a prune that is killed or overtaken.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.catalog.turns import Turns, TurnStore
from tests.core.retention_oracle import must_stay, wanted_by_policies
from tests.fakes.memory_store import MemoryStore
from tests.lanes import nightly
from tests.restore.one_output import restore
from tests.restore.stored_checkpoints import store_checkpoint

from keepstep_agent.catalog.deep_check import check
from keepstep_agent.catalog.markers import list_committed, list_weights_only
from keepstep_agent.catalog.pruning import prune
from keepstep_agent.catalog.reading import CommittedCheckpoint
from keepstep_agent.catalog.recent_pruning import prune_recent
from keepstep_agent.core.model import Kind, SaveInfo
from keepstep_agent.core.policies.restore_choice import CommittedSave, Pin, decode_pin
from keepstep_agent.core.policies.retention.horizon import Horizon
from keepstep_agent.core.settings.values import Duration, RetentionSettings
from keepstep_agent.core.stored.object_layout import (
    DAMAGED_PREFIX,
    RESUME_PREFIX,
    damage_key,
    file_key,
    manifest_key,
    marker_key,
    weights_key,
)
from keepstep_agent.ports import ObjectInfo
from keepstep_agent.restore.agreement import Agreement
from keepstep_agent.restore.candidates import Candidates

_DAY = 24 * 3600.0
_SEEDS_PER_TEST = 10


def _files(step: int) -> dict[str, bytes]:
    return {"model.pt": f"model {step}".encode(), "optimizer.pt": f"optimizer {step}".encode()}


class _World:
    """What has happened at a destination, and what must hold after every request."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.store = MemoryStore()
        self.turns = Turns(seed, self.store, self.check_all, impatient=("prune", "trainer", "restore"))
        pick = self.turns.random.choice
        self.settings = RetentionSettings(
            keep_last=pick([1, 1, 2, 3]),
            keep_every_steps=pick([0, 5, 20]),
            keep_every_seconds=pick([0.0, 300.0, 3000.0]),
            keep_daily=pick([0, 1, 3]),
            keep_final=pick([True, False]),
            weights_only_after=Duration(pick([0, 60, 600])),
        )
        self.begun: dict[str, SaveInfo] = {}
        self.committed: dict[str, CommittedSave] = {}
        self.last_committed = ""
        self.restored = 0

    def check_all(self) -> None:
        for key, info in self.begun.items():
            found = self.store.objects.get(key)
            if found is None:
                continue
            if key not in self.committed:
                self.committed[key] = CommittedSave(
                    key=key, step=info.step, save=info.save, modified_at=found.modified_at
                )
                self.last_committed = key
            own = {*(file_key(info, path) for path in _files(info.step)), manifest_key(info, 0, 1)}
            assert own <= self.store.objects.keys(), (self.seed, key)
        assert not [key for key in self.store.objects if key.startswith(DAMAGED_PREFIX)], self.seed
        if self.committed:
            newest = max(self.committed.values(), key=lambda one: (one.step, one.save))
            assert {newest.key, self.last_committed} <= self.store.objects.keys(), self.seed
        if self.settings.keep_final:
            finals = {key for key in self.committed if self.begun[key].kind is Kind.FINAL}
            left = {weights_key(self.begun[key]) for key in finals - self.store.objects.keys()}
            assert left <= self.store.objects.keys(), self.seed

    def pinned(self) -> set[str]:
        """The markers that pins of the last day name."""
        return {
            marker
            for key, found in self.store.objects.items()
            if key.startswith(RESUME_PREFIX) and found.modified_at >= self.store.now - _DAY
            for marker in decode_pin(found.body, key).markers
        }


class _Trainer:
    """A run that saves at higher and higher steps. Now and then somebody starts it again from an older checkpoint."""

    def __init__(self, world: _World) -> None:
        self._world = world
        self._random = world.turns.random
        self._step = self._saves = 0

    async def run(self) -> None:
        self._saves += 1
        self._step = max(1, self._step + (-7 if self._random.random() < 0.1 else self._random.randint(1, 4)))
        save, kind = f"{self._saves:08x}-{self._step:06d}", self._random.choice([Kind.PERIODIC] * 9 + [Kind.FINAL])
        info = SaveInfo(save=save, name=f"checkpoint-{self._step}", step=self._step, kind=kind, world_size=1)
        self._world.begun[marker_key(info)] = info
        store = TurnStore(self._world.store, self._world.turns, "trainer")
        # Its clock is not the store's.
        saved_at = self._world.store.now + self._random.choice([0.0, 0.0, 90.0, -90.0])
        ranks = [_files(self._step)]
        await store_checkpoint(store, self._step, save=save, saved_at=saved_at, ranks=ranks, kind=kind)


class _Restore:
    """Pods that restore the newest checkpoint, as far as they ask the store for it, and pin it."""

    def __init__(self, world: _World) -> None:
        self._world = world
        self._attempts = 0

    async def run(self) -> None:
        self._attempts += 1
        attempt = f"attempt-{self._attempts}"
        store = TurnStore(self._world.store, self._world.turns, "restore")
        agreement = Agreement(
            store, attempt, partial(list_committed, store), place="", node_rank=0, timeout_seconds=60.0
        )
        assert await agreement.join() is None

        async def take(checkpoint: CommittedCheckpoint) -> CommittedCheckpoint:
            for file in checkpoint.files:
                body = await store.get(file.key, limit_bytes=1000)
                assert body == _files(checkpoint.committed.step)[file.entry.path]
            return checkpoint

        candidates = Candidates(store, partial(list_committed, store))
        taken = await candidates.first(await list_committed(store), take)
        if taken is None:
            return
        one = taken.committed
        assert await agreement.begin(Pin(attempt=attempt, markers=(one.key,)))
        self._world.restored += 1


class _PruneStore(TurnStore):
    """A prune's view. What a pin named when the prune began must not be deleted."""

    def __init__(self, world: _World, who: str) -> None:
        super().__init__(world.store, world.turns, who)
        self._pinned = world.pinned()

    async def delete(self, key: str) -> None:
        assert key not in self._pinned
        await super().delete(key)


def _pruner(world: _World, who: str) -> Callable[[], Coroutine[Any, Any, None]]:
    async def work() -> None:
        store = _PruneStore(world, who)
        if world.turns.random.random() < 0.5:
            await prune_recent(store, world.settings, Horizon(), series={""}, now=world.store.now)
        else:
            await prune(store, world.settings, now=world.store.now)

    return work


async def _simulate(seed: int) -> tuple[int, int, int]:
    """Return how many checkpoints were deleted, how many restored, and of how many only the weights are left."""
    world = _World(seed)
    await world.turns.run(
        {
            "trainer": _Trainer(world).run,
            "restore": _Restore(world).run,
            "prune-0": _pruner(world, "prune-0"),
            "prune-1": _pruner(world, "prune-1"),
        },
        steps=1000,
    )
    await _all_are_whole(world.store)
    every = list(world.committed.values())
    left = await _stored(world.store)
    assert wanted_by_policies(every, world.settings) <= left, seed
    await prune(world.store, world.settings, now=world.store.now)
    await prune(world.store, world.settings, now=world.store.now)
    assert wanted_by_policies(every, world.settings) <= await _stored(world.store)
    weights_only = await list_weights_only(world.store)
    for one in weights_only:
        assert await check(world.store, one) == ()
    return len(every) - len(left), world.restored, len(weights_only)


async def _stored(store: MemoryStore) -> set[str]:
    """The saves that are whole or of which the weights are left."""
    return {one.save for one in (*await list_committed(store), *await list_weights_only(store))}


async def _all_are_whole(store: MemoryStore) -> None:
    for one in await list_committed(store):
        assert await check(store, one) == ()


@pytest.mark.parametrize("first", [0, *nightly(*range(_SEEDS_PER_TEST, 30, _SEEDS_PER_TEST))])
async def test_saves_restores_and_prunes_in_any_order_break_no_promise(first: int) -> None:
    found = [await _simulate(seed) for seed in range(first, first + _SEEDS_PER_TEST)]
    assert all(sum(counts) > 3 * _SEEDS_PER_TEST for counts in zip(*found, strict=True))


class _MomentStore(MemoryStore):
    """Before its request number `at` something happens, once, unless `happens` is None. `reached`: it has."""

    def __init__(self, at: int = -1, happens: Callable[[], Awaitable[None]] | None = None) -> None:
        super().__init__()
        self.at = at
        self.happens = happens
        self.reached = False

    async def _request(self) -> None:
        self.at -= 1
        if self.at == -1 and self.happens:
            self.reached = True
            await self.happens()

    async def put(self, key: str, body: bytes, *, if_absent: bool = False) -> None:
        await self._request()
        await super().put(key, body, if_absent=if_absent)

    async def delete(self, key: str) -> None:
        await self._request()
        await super().delete(key)

    async def head(self, key: str) -> ObjectInfo:
        await self._request()
        return await super().head(key)

    async def get(self, key: str, *, limit_bytes: int, fresh: bool = False) -> bytes:
        await self._request()
        return await super().get(key, limit_bytes=limit_bytes, fresh=fresh)

    async def get_into(self, key: str, *, offset_bytes: int, size_bytes: int, version: str, descriptor: int) -> int:
        await self._request()
        return await super().get_into(
            key, offset_bytes=offset_bytes, size_bytes=size_bytes, version=version, descriptor=descriptor
        )

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        await self._request()
        async for one in super().list(prefix):
            yield one


_POLICIES = RetentionSettings(keep_last=2, keep_every_steps=4, keep_daily=2)
_MOST_REQUESTS = 200


async def _with_history(store: MemoryStore) -> list[SaveInfo]:
    """Nine checkpoints, three a day."""
    infos = []
    for step in range(1, 10):
        infos.append(await store_checkpoint(store, step, ranks=[_files(step)]))
        store.now += _DAY / 3
    return infos


async def _moves_on(store: MemoryStore, steps: Sequence[int], settings: RetentionSettings) -> None:
    """Newer checkpoints are committed, and a prune deletes what they replace. It is another process that does this."""
    other = MemoryStore(now=store.now)
    other.objects = store.objects
    for step in steps:
        await store_checkpoint(other, step, ranks=[_files(step)])
    await prune(other, settings, now=other.now)


@pytest.mark.parametrize("settings", [RetentionSettings(keep_last=1), _POLICIES], ids=["the last", "policies"])
async def test_a_restore_that_saves_and_a_prune_overtake_ends_with_a_whole_checkpoint(
    settings: RetentionSettings, tmp_path: Path
) -> None:
    steps: set[int] = set()
    for at in range(_MOST_REQUESTS):
        store, volume = _MomentStore(), tmp_path / str(at)
        await _with_history(store)
        store.at, store.happens = at, partial(_moves_on, store, (11, 13), settings)
        restored = await restore(
            store,
            checkpoint_directory=volume / "checkpoints",
            volume=volume,
            state_directory=volume / "state",
            attempt="job-1",
        )
        store.happens = None
        assert restored is not None
        assert {path.name: path.read_bytes() for path in restored.path.iterdir()} == _files(restored.step)
        assert damage_key(restored.save) not in store.objects
        assert not [key for key in store.objects if key.startswith(DAMAGED_PREFIX)]
        await _all_are_whole(store)
        # What the restore has pinned, a later prune spares.
        before = {one.save for one in await list_committed(store)}
        await _moves_on(store, (15, 17, 19), settings)
        assert {restored.save} & before <= {one.save for one in await list_committed(store)}
        steps.add(restored.step)
        if not store.reached:
            break
    assert not store.reached
    assert steps == {9, 13}


class _KilledError(Exception):
    """The prune ends here."""


async def test_a_prune_killed_at_any_request_leaves_whole_checkpoints_and_the_next_ends() -> None:
    async def dies() -> None:
        raise _KilledError

    for at in range(_MOST_REQUESTS):
        store = _MomentStore()
        await _with_history(store)
        store.at, store.happens = at, dies
        try:
            await prune(store, _POLICIES, now=store.now)
            store.happens = None
        except _KilledError:
            await _all_are_whole(store)
            await prune(store, _POLICIES, now=store.now)
        # 9 and 8 are the newest, 8 and 4 milestones, 9 and 7 the last of their days.
        assert [one.step for one in await list_committed(store)] == [9, 8, 7, 4]
        if not store.reached:
            break
    assert not store.reached


@pytest.mark.parametrize("committed_meanwhile", [10, 7], ids=["a newer one", "a run that fell back"])
async def test_whatever_is_committed_while_a_prune_works_stays(committed_meanwhile: int) -> None:
    for at in range(_MOST_REQUESTS):
        store = _MomentStore()
        await _with_history(store)
        before = await list_committed(store)
        save = "ffffffff-000001"

        async def commits(store: MemoryStore = store, save: str = save) -> None:
            other = MemoryStore(now=store.now)
            other.objects = store.objects
            await store_checkpoint(other, committed_meanwhile, save=save, ranks=[_files(committed_meanwhile)])

        store.at, store.happens = at, commits
        await prune(store, _POLICIES, now=store.now)
        store.happens = None
        left = {one.save for one in await list_committed(store)}
        await _all_are_whole(store)
        saves = [one.save for one in before]
        wanted = must_stay(before, _POLICIES, validated=saves, damaged=(), protected=())
        assert wanted <= left
        assert (save in left) == store.reached
        if not store.reached:
            break
    assert not store.reached

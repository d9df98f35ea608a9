"""A run that was copied to another bucket (`aws s3 sync`, replication): the store's times are those of the copies."""

import random
from dataclasses import replace
from typing import Any

import pytest
from tests.fakes.fake_store import FakeStore
from tests.restore.stored_checkpoints import store_checkpoint

from keepstep_agent.catalog.ledger import read_ledger
from keepstep_agent.catalog.markers import SaveTimes, list_committed, list_weights_only, newest_of_run, read_marker
from keepstep_agent.catalog.pruning import prune
from keepstep_agent.catalog.recent_pruning import prune_recent
from keepstep_agent.catalog.usage import storage_use
from keepstep_agent.cli.destination.download import _chosen
from keepstep_agent.core.errors import ErrorKind, StoreError
from keepstep_agent.core.model import Kind
from keepstep_agent.core.policies.retention import horizon as horizon_rules
from keepstep_agent.core.policies.retention.horizon import Horizon
from keepstep_agent.core.policies.run_overview import overview_of, usable_newest
from keepstep_agent.core.policies.storage_use import AgeLimits, RunState
from keepstep_agent.core.settings.values import Duration, RetentionSettings, Settings, StoreSettings

DAY = 24 * 3600.0
SEEDS = range(4)


def copy_all(store: FakeStore, seed: int) -> None:
    """Give every object a new time, in the order in which many transfers happen to end."""
    keys = list(store.objects)
    random.Random(seed).shuffle(keys)
    for key in keys:
        store.now += 1.0
        store.objects[key] = replace(store.objects[key], modified_at=store.now)


async def steps_left(store: FakeStore) -> list[int]:
    return [one.step for one in await list_committed(store)]


async def a_checkpoint_a_day(store: FakeStore, days: int) -> None:
    store.now -= store.now % DAY
    for step in range(1, days + 1):
        await store_checkpoint(store, step)
        store.now += DAY


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(
    "keep",
    [RetentionSettings(keep_last=1, keep_daily=9), RetentionSettings(keep_last=1, keep_every_seconds=DAY)],
    ids=["daily", "interval"],
)
async def test_a_commit_after_the_copy_costs_no_checkpoint_that_was_kept(
    keep: RetentionSettings, whole: bool, store: FakeStore
) -> None:
    await a_checkpoint_a_day(store, 5)
    copy_all(store, 1)
    await store_checkpoint(store, 6)

    if whole:
        await prune(store, keep, now=store.now)
    else:
        await prune_recent(store, keep, Horizon(), series={""}, now=store.now)

    assert await steps_left(store) == [6, 5, 4, 3, 2, 1]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("whole", [True, False])
async def test_what_a_run_committed_after_it_fell_back_stays_after_a_copy(
    whole: bool, seed: int, store: FakeStore
) -> None:
    for step in (1, 2, 9):
        await store_checkpoint(store, step)
        store.now += 60
    # It went on from 2: nobody knows why, so 9 justifies no deletion.
    await store_checkpoint(store, 3)
    copy_all(store, seed)
    keep = RetentionSettings(keep_last=1)

    if whole:
        await prune(store, keep, now=store.now)
    else:
        await prune_recent(store, keep, Horizon(), series={""}, now=store.now)

    assert {9, 3} <= set(await steps_left(store))


async def test_what_was_copied_above_the_horizon_justifies_nothing_until_a_whole_prune(
    store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(horizon_rules, "_RECENT", 3)
    keep = RetentionSettings(keep_last=1)
    for step in (1, 2, 3, 4, 5, 9):
        await store_checkpoint(store, step)
        store.now += 60
    below = await store_checkpoint(store, 3, save="0123abcd-000099")
    for key in sorted(store.objects, key=lambda key: below.save not in key):
        store.now += 1.0
        store.objects[key] = replace(store.objects[key], modified_at=store.now)
    horizon = (await prune(store, keep, now=store.now, dry_run=True)).horizon
    assert horizon.step == 4

    assert await prune_recent(store, keep, horizon, series={""}, now=store.now) is not None

    assert await steps_left(store) == [9, 5, 4, 3, 3, 2, 1]


async def test_after_a_copy_retention_goes_on_with_what_is_committed_then(store: FakeStore) -> None:
    await a_checkpoint_a_day(store, 5)
    copy_all(store, 2)
    for step in (6, 7):
        store.now += DAY
        await store_checkpoint(store, step)
    await prune(store, RetentionSettings(keep_last=2), now=store.now)
    assert await steps_left(store) == [7, 6]


@pytest.mark.parametrize("off_seconds", [400 * DAY, -400 * DAY, -1_690_000_000.0], ids=["ahead", "behind", "1970"])
async def test_an_agent_with_a_wrong_clock_costs_no_daily_checkpoint(off_seconds: float, store: FakeStore) -> None:
    store.now -= store.now % DAY
    for step in range(1, 6):
        # Once it is right, and then its clock stands still.
        off = off_seconds - step * DAY if step > 2 else 0.0
        await store_checkpoint(store, step, saved_at=store.now + off)
        store.now += DAY
    await prune(store, RetentionSettings(keep_last=1, keep_daily=9), now=store.now)
    assert await steps_left(store) == [5, 4, 3, 2, 1]


async def test_a_marker_that_the_store_does_not_give_counts_by_the_stores_clock(store: FakeStore) -> None:
    await a_checkpoint_a_day(store, 5)
    get = store.get

    async def archived(key: str, **options: Any) -> bytes:
        if "0123abcd-000002" in key:
            raise StoreError(ErrorKind.REQUEST_REFUSED, f"{key} is archived")
        return await get(key, **options)

    store.get = archived  # type: ignore[method-assign]
    await prune(store, RetentionSettings(keep_last=1, keep_daily=3, keep_final=False), now=store.now)
    assert await steps_left(store) == [5, 4, 3]


async def test_a_marker_that_was_archived_is_read_when_it_can_be_and_then_no_more(store: FakeStore) -> None:
    await store_checkpoint(store, 1)
    committed, times = await list_committed(store), SaveTimes()
    store.calls.clear()
    store.fail("get", ErrorKind.REQUEST_REFUSED)
    saved_at = [(await times.read(store, committed))[0].saved_at for _ in range(3)]
    assert saved_at == [0.0, store.now, store.now]
    assert [method for method, _ in store.calls].count("get") == 2


async def test_a_clock_that_is_ahead_holds_up_no_retention(store: FakeStore) -> None:
    for step in range(1, 6):
        await store_checkpoint(store, step, saved_at=store.now + (400 * DAY if step == 2 else 0.0))
        store.now += DAY
    await prune(store, RetentionSettings(keep_last=2), now=store.now)
    assert await steps_left(store) == [5, 4]


async def test_while_a_clock_is_behind_retention_keeps_more(store: FakeStore) -> None:
    for step in range(1, 6):
        await store_checkpoint(store, step, saved_at=store.now - (400 * DAY if step > 2 else 0.0))
        store.now += DAY
    await prune(store, RetentionSettings(keep_last=1), now=store.now)
    assert {5, 2} <= set(await steps_left(store))


async def test_the_optimizer_goes_only_where_both_clocks_say_that_it_is_old(store: FakeStore) -> None:
    keep = RetentionSettings(keep_last=1, keep_every_steps=1, weights_only_after=Duration(2 * DAY))
    ranks = [{"model.pt": b"m", "optimizer.pt": b"o"}]
    for step, off in ((1, -400 * DAY), (2, 0.0), (3, 0.0)):
        await store_checkpoint(store, step, saved_at=store.now + off, ranks=ranks)
        store.now += 60
    await prune(store, keep, now=store.now)
    assert [one.step for one in await list_weights_only(store)] == []
    # By the store's clock all are of today.
    copy_all(store, 3)
    await prune(store, keep, now=store.now)
    assert await steps_left(store) == [3, 2, 1]


@pytest.mark.parametrize("seed", SEEDS)
async def test_a_run_that_was_abandoned_before_the_copy_is_abandoned_after_it(seed: int, store: FakeStore) -> None:
    await a_checkpoint_a_day(store, 3)
    last_at = store.now - DAY
    store.now += 30 * DAY
    copy_all(store, seed)

    limits = AgeLimits(now=store.now, abandoned_after_seconds=7 * DAY, orphan_age_seconds=DAY)
    (run,) = (await storage_use(store, limits)).runs

    assert (run.state, run.committed_at) == (RunState.ABANDONED, last_at)


@pytest.mark.parametrize("seed", SEEDS)
async def test_of_several_output_directories_the_one_saved_to_last_is_taken_after_a_copy(
    seed: int, store: FakeStore
) -> None:
    await store_checkpoint(store, 50, output="first")
    store.now += DAY
    await store_checkpoint(store, 10, output="second", kind=Kind.FINAL)
    copy_all(store, seed)

    settings = Settings(volume="", checkpoint_directory="", socket="", store=StoreSettings(destination="s3://copied"))
    assert (await _chosen(store, settings, None, None, weights_only=False)).step == 10
    limits = AgeLimits(now=store.now, abandoned_after_seconds=7 * DAY, orphan_age_seconds=DAY)
    (run,) = (await storage_use(store, limits)).runs
    assert (run.state, run.step) == (RunState.COMPLETE, 10)


async def test_the_pages_of_a_copied_run_show_when_it_was_committed(store: FakeStore) -> None:
    await a_checkpoint_a_day(store, 3)
    last_at = store.now - DAY
    store.now += 30 * DAY
    copy_all(store, 1)
    committed, _ = await newest_of_run(store, "", most=9)
    newest = usable_newest(committed, ())
    assert newest is not None

    overview, _ = overview_of(committed, await read_marker(store, newest), (await read_ledger(store)).lives)

    assert overview.recovery is not None
    assert overview.recovery.committed_at == last_at

"""Pruning snapshots: what a remaining one names stays, and what nobody needs goes."""

import pytest
from tests.catalog.pruned_snapshots import DAY, chain, left, objects_of, pruned, pruned_recent, tombstones
from tests.catalog.stored_snapshots import output, store_snapshot
from tests.core.listings import why_kept
from tests.fakes.fake_store import FakeStore
from tests.restore.stored_checkpoints import flip_byte, store_checkpoint, truncate

from keepstep_agent.catalog.damage import damaged_saves, note_damage, note_passed_over
from keepstep_agent.catalog.markers import list_committed, list_snapshots
from keepstep_agent.catalog.pruning import prune
from keepstep_agent.core.errors import ErrorKind, StoreError
from keepstep_agent.core.settings.values import RetentionSettings
from keepstep_agent.core.stored.object_layout import (
    PRUNED_PREFIX,
    base_key,
    file_key,
    marker_key,
    pack_key,
    passed_over_key,
)


async def test_what_a_remaining_snapshot_names_stays_and_everything_else_goes(store: FakeStore) -> None:
    first, second, third, fourth = await chain(store)
    before = dict(store.objects)
    report = await pruned(store, keep_last=2)
    assert await left(store) == [4, 3]
    # With what stays, the manifest stays that shows whose it is.
    assert objects_of(store, first) == {"out/a.pt", ".keepstep/manifest-00000-00001.json"}
    assert objects_of(store, second) == {"out/b.pt", ".keepstep/manifest-00000-00001.json"}
    assert objects_of(store, third) == {"out/c.pt", ".keepstep/manifest-00000-00001.json", ".keepstep/base.json"}
    assert objects_of(store, fourth) == {
        "out/b.pt",
        "out/c.pt",
        ".keepstep/manifest-00000-00001.json",
        ".keepstep/base.json",
    }
    assert tombstones(store) == []
    assert {one.save for one in report.plan.deletions} == {first.info.save, second.info.save}
    gone = {key: one for key, one in before.items() if key not in store.objects and not key.startswith(".")}
    assert report.freed_bytes == sum(len(one.body) for one in gone.values()) > 0


async def test_what_is_left_of_a_pruned_snapshot_goes_once_nobody_names_it(store: FakeStore) -> None:
    first, second, *_ = await chain(store)
    await pruned(store)
    assert await left(store) == [4]
    store.now += 2 * DAY
    fifth = await store_snapshot(store, 5, output(a=2, b=2, c=5))
    store.now += 60
    report = await pruned(store)
    assert await left(store) == [5]
    assert (objects_of(store, first), objects_of(store, second)) == (set(), set())
    assert report.freed_bytes > 0
    assert {key.split("/")[1] for key in store.objects if not key.startswith(".")} == {fifth.info.save}


async def test_of_what_is_left_a_prune_takes_each_object_when_it_is_free(store: FakeStore) -> None:
    first = await store_snapshot(store, 1, output(a=1, b=1))
    second = await store_snapshot(store, 2, output(a=1, b=1, c=1), base=first)
    store.now += 60
    await pruned(store)
    assert {"out/a.pt", "out/b.pt"} < objects_of(store, first)
    store.now += 2 * DAY
    await store_snapshot(store, 3, output(a=1, b=2, c=1), base=second)
    await pruned(store)
    assert await left(store) == [3]
    assert objects_of(store, first) == {"out/a.pt", ".keepstep/manifest-00000-00001.json"}
    report = await pruned(store)
    assert why_kept(report.plan)[first.info.save] == "other snapshots share what is left of it"


async def test_a_pack_stays_as_long_as_one_of_its_files_is_named(store: FakeStore) -> None:
    small = {f"out/small-{number}": bytes([number]) * 100 for number in range(5)}
    first = await store_snapshot(store, 1, output(a=1) | small, packed=small)
    last = dict(list(small.items())[:1])
    await store_snapshot(store, 2, output(a=2) | last, base=first)
    await pruned(store)
    assert await left(store) == [2]
    assert pack_key(first.info, 0, 0) in store.objects
    assert file_key(first.info, "out/a.pt") not in store.objects


async def test_each_series_is_kept_for_itself_and_so_are_announced_checkpoints(store: FakeStore) -> None:
    for step in (100, 200, 300):
        await store_checkpoint(store, step)
    await chain(store, 3)
    await chain(store, 2, series="node-1")
    await chain(store, 1, series="node-2")
    await pruned(store)
    assert [await left(store, series) for series in ("node-0", "node-1", "node-2")] == [[3], [2], [1]]
    assert [one.step for one in await list_committed(store)] == [300]


async def test_multiples_of_a_step_are_no_reason_to_keep_a_snapshot(store: FakeStore) -> None:
    await chain(store)
    await prune(store, RetentionSettings(keep_last=1, keep_every_steps=1), now=store.now)
    assert await left(store) == [4]


async def test_all_snapshots_stay_where_all_checkpoints_do(store: FakeStore) -> None:
    await chain(store)
    store.calls.clear()
    await pruned(store, keep_last=0)
    assert await left(store) == [4, 3, 2, 1]


@pytest.mark.parametrize("what", ["truncated", "noted", "passed over"])
async def test_a_damaged_newest_justifies_no_deletion(store: FakeStore, what: str) -> None:
    *_, newest = await chain(store, 3)
    if what == "truncated":
        await truncate(store, file_key(newest.info, "out/c.pt"))
    elif what == "passed over":
        await note_passed_over(store, newest.info.save, "programs failed with it")
    else:
        await flip_byte(store, file_key(newest.info, "out/c.pt"), 5)
        await note_damage(store, newest.info.save, "restore found it so")
    await pruned(store)
    assert [one.step for one in (await list_snapshots(store))["node-0"]] == [3, 2]


async def test_a_note_that_the_store_protects_does_not_end_the_prune(store: FakeStore) -> None:
    first, second, *_ = await chain(store, 4)
    for one in (first, second):
        await note_passed_over(store, one.info.save, "programs failed with it")
    delete = store.delete

    async def refuse(key: str) -> None:
        if key == passed_over_key(first.info.save):
            raise StoreError(ErrorKind.OBJECT_LOCKED, f"{key} is protected")
        await delete(key)

    store.delete = refuse  # type: ignore[method-assign]
    await pruned(store)
    assert await damaged_saves(store) == {first.info.save}
    assert not {1, 2} & {one.step for one in (await list_snapshots(store))["node-0"]}


async def test_the_note_of_a_snapshot_that_was_passed_over_goes_with_it(store: FakeStore) -> None:
    first, *_ = await chain(store, 3)
    await note_passed_over(store, first.info.save, "programs failed with it")
    await pruned(store)
    assert await damaged_saves(store) == frozenset()


async def test_what_a_volume_resumed_from_stays_and_so_does_all_that_it_names(store: FakeStore) -> None:
    manifests = await chain(store)
    await pruned(store, resumed_from=manifests[1].info.save)
    assert await left(store) == [4, 2]


async def test_a_listing_without_a_known_snapshot_refuses_everything(store: FakeStore) -> None:
    await chain(store)
    report = await pruned(store, known=["0123abcd-000099"])
    assert "0123abcd-000099" in report.plan.refused
    assert await left(store) == [4, 3, 2, 1]


async def test_a_dry_run_changes_nothing_and_says_the_same(store: FakeStore) -> None:
    await chain(store)
    before = dict(store.objects)
    shown = await pruned(store, dry_run=True)
    assert store.objects == before
    done = await pruned(store)
    assert (done.plan, done.freed_bytes) == (shown.plan, shown.freed_bytes)


async def test_tombstones_come_first_then_a_look_then_markers_objects_and_manifests(store: FakeStore) -> None:
    first, second, *_ = await chain(store, 3)
    store.calls.clear()
    await pruned(store)
    changes = [(method, key) for method, key in store.calls if method in ("put", "delete")]
    keys = [key.rpartition("/")[0] if key.startswith(PRUNED_PREFIX) else key for _, key in changes]
    pair = [f"{PRUNED_PREFIX}{one.info.save}" for one in (first, second)]
    assert keys[:2] == pair
    assert keys[2:4] == [marker_key(one.info) for one in (first, second)]
    assert keys[-2:] == pair
    assert keys[4:-2] == [
        file_key(first.info, "out/b.pt"),
        file_key(first.info, "out/c.pt"),
        file_key(second.info, "out/c.pt"),
        base_key(second.info),
    ]
    put, last_put = ([index for index, call in enumerate(store.calls) if call[0] == "put"][index] for index in (0, -1))
    assert {method for method, _ in store.calls[put : last_put + 1]} == {"put"}
    looks = [key for method, key in store.calls[last_put:] if method == "list"]
    assert looks[:2] == ["", ".keepstep/"]


async def test_a_prune_costs_no_request_more_where_there_are_no_snapshots(store: FakeStore) -> None:
    for step in (1, 2, 3):
        await store_checkpoint(store, step)
    store.calls.clear()
    await pruned(store)
    listed = [key for method, key in store.calls if method == "list"]
    assert listed == [".keepstep/commits/", "", "checkpoint-3/0123abcd-000003/"]
    # Marker and manifest of the newest, and the markers of what goes: they say whether it is final.
    assert len([key for method, key in store.calls if method == "get"]) == 2 + 2


async def test_snapshots_that_are_all_kept_cost_no_second_look(store: FakeStore) -> None:
    await chain(store, 2)
    store.calls.clear()
    await pruned(store, keep_last=2)
    assert [key for method, key in store.calls if method == "list"] == [".keepstep/commits/", ""]
    assert not [key for method, key in store.calls if method == "get"]


async def test_after_a_commit_the_series_alone_is_pruned_and_what_others_name_stays(store: FakeStore) -> None:
    for step in (100, 200):
        await store_checkpoint(store, step)
    first, *_ = await chain(store)
    await chain(store, 3, series="node-1")
    # A volume that came from another node: what it has not changed belongs to that node's snapshot.
    await store_snapshot(store, 9, output(a=1, c=9), base=first, series="node-7")
    store.calls.clear()
    report = await pruned_recent(store)
    listed = {key for method, key in store.calls if method == "list"}
    assert not listed & {"", ".keepstep/", ".keepstep/commits/"}
    assert [await left(store, series) for series in ("node-0", "node-1", "node-7")] == [[4], [3, 2, 1], [9]]
    assert [one.step for one in await list_committed(store)] == [200, 100]
    assert len(report.plan.deletions) == 3
    assert tombstones(store) == []


async def test_after_a_commit_a_reserved_snapshot_stays_whoever_reserves_it(store: FakeStore) -> None:
    manifests = await chain(store)
    files = output(a=1, c=9)
    await store_snapshot(store, 9, files, base=manifests[1], series="node-7", committed=False)
    report = await pruned_recent(store)
    assert await left(store) == [4, 2]
    assert why_kept(report.plan)[manifests[1].info.save] == "a snapshot in progress shares its objects"


async def test_a_snapshot_that_the_store_protects_stays_with_all_that_it_names(store: FakeStore) -> None:
    first, *_ = await chain(store)
    before = set(store.objects)
    # Markers go first: that of the first snapshot is refused, and it names what others own.
    store.fail("delete", ErrorKind.OBJECT_LOCKED)
    report = await pruned(store)
    assert report.plan.deletions == ()
    reasons = why_kept(report.plan)
    assert reasons[first.info.save] == "the store's retention protects it"
    assert {key for key in before - set(store.objects) if not key.startswith(".")} == set()

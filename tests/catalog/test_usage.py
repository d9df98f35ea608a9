"""What `keepstep du` reads: one listing, few markers, and the parts of unfinished uploads."""

from collections import Counter

import pytest
from tests.catalog.stored_snapshots import output, store_snapshot
from tests.fakes.fake_store import FakeStore
from tests.fakes.memory_store import StoredObject, StoredUpload
from tests.restore.stored_checkpoints import store_checkpoint

from keepstep_agent.adapters.retrying_store import RetryingStore
from keepstep_agent.catalog import usage
from keepstep_agent.catalog.usage import storage_use
from keepstep_agent.core.errors import ErrorKind, StoreError
from keepstep_agent.core.model import Kind, SaveInfo
from keepstep_agent.core.policies.storage_use import AgeLimits, Amount, RunState, UseKind
from keepstep_agent.core.stored.object_layout import file_key, marker_key

DAY = 24 * 3600.0


def limits(store: FakeStore) -> AgeLimits:
    return AgeLimits(now=store.now, abandoned_after_seconds=7 * DAY, orphan_age_seconds=DAY)


def move_below(store: FakeStore, run: str) -> None:
    """Put what has no run yet into one."""
    store.objects = {
        key if key.startswith("runs/") else f"runs/{run}/{key}": stored for key, stored in store.objects.items()
    }


async def test_one_marker_of_each_run_is_read_and_all_if_their_kinds_are_wanted(store: FakeStore) -> None:
    for run, kind in (("one", Kind.FINAL), ("two", Kind.JUST_IN_TIME)):
        await store_checkpoint(store, 1)
        await store_checkpoint(store, 2, kind=kind)
        await store_snapshot(store, 1, output(a=1))
        move_below(store, run)
    store.calls.clear()

    found = await storage_use(store, limits(store))

    assert [(one.prefix, one.state, one.step) for one in found.runs] == [
        ("runs/one/", RunState.COMPLETE, 2),
        ("runs/two/", RunState.ACTIVE, 2),
    ]
    assert Counter(method for method, _ in store.calls) == {"list": 1, "list_uploads": 1, "get": 2}
    assert found.total.size_bytes == sum(len(stored.body) for stored in store.objects.values())
    assert found.total.kinds[UseKind.CHECKPOINT].count == 4
    store.calls.clear()

    found = await storage_use(store, limits(store), every_kind=True)

    assert Counter(method for method, _ in store.calls)["get"] == 4
    counts = {kind: amount.count for kind, amount in found.total.kinds.items()}
    assert (counts[UseKind.PERIODIC], counts[UseKind.FINAL], counts[UseKind.JUST_IN_TIME]) == (2, 1, 1)
    assert UseKind.CHECKPOINT not in counts


@pytest.mark.nightly
async def test_hundreds_of_runs_of_hundreds_of_checkpoints_take_one_listing(store: FakeStore) -> None:
    await store_checkpoint(store, 200, ranks=[{"model.pt": b"x"}], kind=Kind.FINAL)
    stored, older = dict(store.objects), StoredObject(b"12345", store.now)
    for step in range(1, 200):
        info = SaveInfo(
            save=f"0123abcd-{step:06d}", name=f"checkpoint-{step}", step=step, kind=Kind.PERIODIC, world_size=1
        )
        stored |= {marker_key(info): older, file_key(info, "model.pt"): older}
    store.objects = {f"run-{run}/{key}": one for run in range(500) for key, one in stored.items()}
    store.calls.clear()

    found = await storage_use(RetryingStore(store), limits(store))

    assert [one.state for one in found.runs] == [RunState.COMPLETE] * 500
    assert found.total.kinds[UseKind.CHECKPOINT] == Amount(
        count=500 * 200, size_bytes=found.total.size_bytes - found.total.kinds[UseKind.RECORD].size_bytes
    )
    assert found.total.size_bytes == 500 * sum(len(one.body) for one in stored.values())
    assert Counter(method for method, _ in store.calls) == {"list": 1, "list_uploads": 1, "get": 500}


async def test_the_parts_of_unfinished_uploads_are_counted(store: FakeStore) -> None:
    await store_checkpoint(store, 1)
    store.uploads["u1"] = StoredUpload("checkpoint-2/x/model.pt", store.now - 2 * DAY, {1: b"12345", 2: b"67"})
    store.uploads["u2"] = StoredUpload("checkpoint-3/x/model.pt", store.now, {1: b"123"})

    (run,) = (await storage_use(RetryingStore(store), limits(store))).runs

    assert run.usage.kinds[UseKind.ORPHANED_UPLOAD] == Amount(count=1, size_bytes=7)
    assert run.usage.kinds[UseKind.UPLOAD_IN_PROGRESS] == Amount(count=1, size_bytes=3)


async def test_uploads_that_end_meanwhile_or_may_not_be_asked_about_are_no_failure(store: FakeStore) -> None:
    await store_checkpoint(store, 1)
    for number in range(3):
        store.uploads[f"u{number}"] = StoredUpload("checkpoint-2/x/model.pt", store.now + number, {1: b"123"})
    store.fail("list_parts", ErrorKind.UPLOAD_LOST)
    store.fail("list_parts", ErrorKind.ACCESS_DENIED)

    found = await storage_use(store, limits(store))

    assert found.total.kinds[UseKind.UPLOAD_IN_PROGRESS] == Amount(count=2, size_bytes=3)
    assert found.unsized_uploads == 1


async def test_only_so_many_uploads_are_measured(store: FakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "MOST_SIZED_UPLOADS", 2)
    for number in range(5):
        store.uploads[f"u{number}"] = StoredUpload("a", store.now - number, {1: b"123"})

    found = await storage_use(store, limits(store))

    assert found.outside.kinds[UseKind.UPLOAD_IN_PROGRESS] == Amount(count=5, size_bytes=6)
    assert found.unsized_uploads == 3


@pytest.mark.parametrize("kind", [ErrorKind.ACCESS_DENIED, ErrorKind.REQUEST_REFUSED])
async def test_a_store_that_lists_no_uploads_is_said_to_be_so(store: FakeStore, kind: ErrorKind) -> None:
    await store_checkpoint(store, 1)
    store.fail("list_uploads", kind)

    found = await storage_use(store, limits(store))

    assert "list_uploads fails" in found.uploads_unknown
    assert found.total.kinds[UseKind.CHECKPOINT].count == 1


async def test_trouble_with_the_store_is_no_report(store: FakeStore) -> None:
    await store_checkpoint(store, 1)
    for method in ("list", "list_uploads", "get"):
        store.fail(method, ErrorKind.UNREACHABLE)
        with pytest.raises(StoreError):
            await storage_use(store, limits(store))


async def test_a_damaged_marker_is_named_and_its_checkpoint_still_counted(store: FakeStore) -> None:
    info = await store_checkpoint(store, 1)
    store.objects[marker_key(info)].body = b"garbage"
    move_below(store, "one")

    found = await storage_use(store, limits(store))

    assert found.unread == (f"runs/one/{marker_key(info)}",)
    assert found.total.kinds[UseKind.CHECKPOINT].count == 1

"""A start waits for pods of the run that still save, resumes from what they commit, and never waits for ever."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import pytest
from structlog.testing import capture_logs
from tests.fakes.fake_store import FakeStore
from tests.formats.test_frozen_formats import newer
from tests.harness.agent_process import wait_until
from tests.harness.bounds import HANG_SECONDS
from tests.restore.one_output import restore
from tests.restore.restored_snapshots import restored, run
from tests.restore.stored_checkpoints import store_checkpoint
from tests.restore.stored_snapshots import store_snapshot

from keepstep_agent.core.errors import ErrorKind, StoreError
from keepstep_agent.core.limits import DRAINING_BYTES, SECONDS
from keepstep_agent.core.stored.draining import Draining, encode_draining
from keepstep_agent.core.stored.object_layout import DRAINING_PREFIX, LEASE_CLOCK_KEY, draining_key
from keepstep_agent.ports import ObjectInfo
from keepstep_agent.restore import predecessors
from keepstep_agent.restore.init_step import Restored
from keepstep_agent.restore.predecessors import EXPIRY_SECONDS, Predecessors, pod_id, withdraw_own

OLD: Final = "old-pod"
LONG_SECONDS: Final = 600.0
MARGIN_SECONDS: Final = 30.0


@pytest.fixture(autouse=True)
def _short_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predecessors, "_LOOK_SECONDS", 0.05)


async def drains(store: FakeStore, pod: str = OLD, seconds_left: float = LONG_SECONDS) -> None:
    notice = Draining(holder=f"trainer-{pod}", seconds_left=seconds_left)
    await store.put(draining_key(pod), encode_draining(notice))


async def start(store: FakeStore, folder: Path, *, attempt: str = "", place: str = "") -> Restored | None:
    async with asyncio.timeout(HANG_SECONDS):
        return await restore(
            store,
            checkpoint_directory=folder / "checkpoints",
            volume=folder,
            state_directory=folder / "state",
            attempt=attempt,
            place=place,
            predecessors=Predecessors("new-pod"),
        )


@asynccontextmanager
async def waiting(store: FakeStore, folder: Path) -> AsyncIterator["asyncio.Task[Restored | None]"]:
    """A start that has begun to wait."""
    task = asyncio.create_task(start(store, folder))
    has_looked = lambda: LEASE_CLOCK_KEY in store.objects  # noqa: E731
    await asyncio.to_thread(wait_until, has_looked, HANG_SECONDS, "it waits")
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait({task})


async def looks_twice(store: FakeStore) -> None:
    def looks() -> int:
        return sum(method == "list" and key == DRAINING_PREFIX for method, key in store.calls)

    before = looks()
    async with asyncio.timeout(HANG_SECONDS):
        while looks() < before + 2:  # noqa: ASYNC110 - the start runs in another task
            await asyncio.sleep(0.01)


def step_of(restored: Restored | None) -> int | None:
    return restored.step if restored else None


def notices(store: FakeStore) -> list[str]:
    return [key for key in store.objects if key.startswith(DRAINING_PREFIX)]


async def test_a_start_takes_what_the_pod_before_it_commits_while_it_waits(store: FakeStore, tmp_path: Path) -> None:
    await store_checkpoint(store, 60)
    await drains(store)
    with capture_logs() as logs:
        async with waiting(store, tmp_path) as started:
            await store_checkpoint(store, 115)
            await store.delete(draining_key(OLD))
            assert step_of(await started) == 115
    (said,) = [line for line in logs if line["event"] == "restore.waits_for_predecessor"]
    assert said["predecessor"] == "trainer-old-pod"
    assert LONG_SECONDS < said["at_most_seconds"] <= LONG_SECONDS + MARGIN_SECONDS


async def test_it_waits_for_every_pod_of_the_start_before(store: FakeStore, tmp_path: Path) -> None:
    for name in ("worker-0", "worker-1"):
        await drains(store, name)
    async with waiting(store, tmp_path) as started:
        await store.delete(draining_key("worker-1"))
        await looks_twice(store)
        assert not started.done()
        await store_checkpoint(store, 115)
        await store.delete(draining_key("worker-0"))
        assert step_of(await started) == 115


async def test_it_goes_on_when_the_pod_had_its_time_and_30_seconds(store: FakeStore, tmp_path: Path) -> None:
    await store_checkpoint(store, 60)
    await drains(store, seconds_left=8.0)
    store.now += 8.0 + MARGIN_SECONDS - 4.0
    async with waiting(store, tmp_path) as started:
        await looks_twice(store)
        assert not started.done()
        assert step_of(await started) == 60
    assert notices(store) == []


async def test_what_has_expired_holds_up_nobody_and_is_deleted(store: FakeStore, tmp_path: Path) -> None:
    await store_checkpoint(store, 60)
    await drains(store, seconds_left=8.0)
    store.now += 8.0 + MARGIN_SECONDS
    store.fail("delete", ErrorKind.ACCESS_DENIED)
    async with asyncio.timeout(HANG_SECONDS):
        await Predecessors("new-pod").wait(store)
    assert notices(store) == [draining_key(OLD)]
    assert step_of(await start(store, tmp_path)) == 60
    assert notices(store) == []


async def test_the_same_pod_started_again_in_place_holds_up_neither_itself_nor_others(
    store: FakeStore, tmp_path: Path
) -> None:
    own = pod_id(tmp_path, tmp_path / "state")
    assert own == pod_id(tmp_path, tmp_path / "state")
    await drains(store, own)
    async with asyncio.timeout(HANG_SECONDS):
        await Predecessors(own).wait(store)
        assert notices(store) == [draining_key(own)]
        await withdraw_own(store, own)
        await Predecessors("another-pod").wait(store)


async def test_pods_of_one_start_do_not_wait_for_each_other(store: FakeStore, tmp_path: Path) -> None:
    await store_checkpoint(store, 60)
    assert step_of(await start(store, tmp_path / "0", attempt="job", place="0")) == 60
    # It is evicted while the other one of this start has not begun.
    await drains(store, "0")
    assert step_of(await start(store, tmp_path / "1", attempt="job", place="1")) == 60
    assert LEASE_CLOCK_KEY not in store.objects
    # Its replacement begins another start.
    again = asyncio.create_task(start(store, tmp_path / "again", attempt="job", place="0"))
    await asyncio.to_thread(wait_until, lambda: LEASE_CLOCK_KEY in store.objects, HANG_SECONDS, "it waits")
    await store_checkpoint(store, 115)
    await store.delete(draining_key("0"))
    assert step_of(await again) == 115


HOSTILE: Final = {
    "nothing": b"",
    "no checksum": b"{}",
    "no JSON": b"\xff" * 100,
    "more than its limit": encode_draining(Draining(holder="x", seconds_left=1.0)) + b" " * DRAINING_BYTES,
    "a newer format": newer(encode_draining(Draining(holder="x", seconds_left=1.0))),
    "more seconds than a grace period has": encode_draining(Draining(holder="x", seconds_left=SECONDS + 1.0)),
    "seconds before it began": encode_draining(Draining(holder="x", seconds_left=-1.0)),
    "no number": encode_draining(Draining(holder="x", seconds_left=float("nan"))),
    "a name without end": encode_draining(Draining(holder="x" * 600, seconds_left=1.0)),
}


@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE)
async def test_what_cannot_be_read_holds_up_nobody(body: bytes, store: FakeStore, tmp_path: Path) -> None:
    await store_checkpoint(store, 60)
    await store.put(draining_key(OLD), body)
    begun_at = asyncio.get_running_loop().time()
    assert step_of(await start(store, tmp_path)) == 60
    assert asyncio.get_running_loop().time() - begun_at < MARGIN_SECONDS
    # Whoever knows its format may wait for it.
    assert notices(store) == [draining_key(OLD)]


async def test_a_strange_key_holds_up_nobody(store: FakeStore, tmp_path: Path) -> None:
    body = encode_draining(Draining(holder="x", seconds_left=LONG_SECONDS))
    for key in ("a/b.json", ".json", "x", f"{'y' * 200}.json"):
        await store.put(f"{DRAINING_PREFIX}{key}", body)
    assert await start(store, tmp_path) is None


async def test_a_pod_that_is_killed_after_its_notice_holds_up_a_start_for_45_seconds(
    store: FakeStore, tmp_path: Path
) -> None:
    await drains(store, seconds_left=float(SECONDS))
    store.now += EXPIRY_SECONDS - 4.0
    async with waiting(store, tmp_path) as started:
        await looks_twice(store)
        assert not started.done()
        assert await started is None
    assert notices(store) == []


async def test_a_pod_that_renews_its_notice_is_waited_for(store: FakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predecessors, "EXPIRY_SECONDS", 4.0)
    waits = Predecessors("new-pod")
    await drains(store)
    with capture_logs() as logs:
        waiter = asyncio.create_task(waits.wait(store))
        for _ in range(4):
            await looks_twice(store)
            store.now += 0.1
            await drains(store)
        assert not waiter.done()
        async with asyncio.timeout(HANG_SECONDS):
            await waiter
    # A line for a pod, and not for each renewal.
    (said,) = [line for line in logs if line["event"] == "restore.waits_for_predecessor"]
    assert said["at_most_seconds"] == LONG_SECONDS + MARGIN_SECONDS


class _WrittenAnew(FakeStore):
    """Somebody replaces a notice all the time."""

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        if prefix == DRAINING_PREFIX:
            self.now += 1.0
            await drains(self)
        async for one in super().list(prefix):
            yield one


async def test_notices_that_come_again_and_again_hold_up_a_start_for_a_bounded_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(predecessors, "LONGEST_SECONDS", 0.5)
    store, waits = _WrittenAnew(), Predecessors("new-pod")
    async with asyncio.timeout(HANG_SECONDS):
        await waits.wait(store)
        looks = len(store.calls)
        # A start that finds another pin waits again.
        await waits.wait(store)
    assert len(store.calls) == looks


async def test_without_the_stores_time_a_notice_counts_from_when_it_was_seen(store: FakeStore) -> None:
    await drains(store, seconds_left=0.0)
    # Not by this machine's clock, whatever it says: the store's is decades away.
    store.now += 1e9
    store.fail("put", ErrorKind.ACCESS_DENIED)
    with capture_logs() as logs, pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await Predecessors("new-pod").wait(store)
    assert [line["predecessor"] for line in logs if "predecessor" in line] == ["trainer-old-pod"]


async def test_a_store_that_does_not_answer_is_an_error_and_no_reason_to_begin(
    store: FakeStore, tmp_path: Path
) -> None:
    store.fail("list", ErrorKind.UNREACHABLE)
    with pytest.raises(StoreError):
        await start(store, tmp_path)


async def test_the_newest_snapshot_is_that_of_the_pod_before(store: FakeStore, tmp_path: Path) -> None:
    await store_snapshot(store, 60, {"out/state": b"60"})
    await drains(store)
    waits = Predecessors("new-pod")
    started = asyncio.create_task(restored(store, tmp_path, predecessors=waits))
    await looks_twice(store)
    await store_snapshot(store, 115, {"out/state": b"115"})
    await store.delete(draining_key(OLD))
    async with asyncio.timeout(HANG_SECONDS):
        (snapshot,) = (await started).snapshots
    assert snapshot.number == 115
    assert (tmp_path / "out" / "state").read_bytes() == b"115"


async def test_without_a_snapshot_nobody_waits_to_choose_one(store: FakeStore, tmp_path: Path) -> None:
    await drains(store)
    async with asyncio.timeout(HANG_SECONDS):
        assert await run(store, tmp_path, predecessors=Predecessors("new-pod")) is None

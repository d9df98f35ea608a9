"""One `keepstep run` at a time at a destination: who is refused, who waits, and who never has to."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from tests.fakes.fake_store import FakeStore
from tests.harness.agent_process import wait_until
from tests.harness.bounds import HANG_SECONDS

from keepstep_agent.core.errors import ErrorKind, KeepstepError, StoreError
from keepstep_agent.core.stored.lease import Lease, decode_lease
from keepstep_agent.core.stored.object_layout import LEASE_CLOCK_KEY, LEASE_KEY
from keepstep_agent.ports import ObjectInfo
from keepstep_agent.restore import run_lease
from keepstep_agent.restore.run_lease import EXPIRY_SECONDS, RunLease


def lease(name: str, *, attempt: str = "") -> Lease:
    return Lease(volume=f"volume-{name}", attempt=attempt, holder=f"process of {name}")


def run(store: FakeStore, name: str, *, attempt: str = "", renews: bool = True) -> RunLease:
    return RunLease(store, lease(name, attempt=attempt), renews=renews)


async def begin(of_run: RunLease, *, take_over: bool = False) -> None:
    """As restore does: the lease stays behind for the agent."""
    async with asyncio.timeout(HANG_SECONDS), of_run.held(take_over=take_over):
        pass


async def somebody_waits(store: FakeStore) -> None:
    await asyncio.to_thread(wait_until, lambda: LEASE_CLOCK_KEY in store.objects, HANG_SECONDS, "a start waits")


@asynccontextmanager
async def waiting(store: FakeStore, of_run: RunLease) -> AsyncIterator["asyncio.Task[None]"]:
    """A start that waits for the lease of another run."""
    task = asyncio.create_task(begin(of_run))
    await somebody_waits(store)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait({task})


def holder(store: FakeStore) -> Lease:
    return decode_lease(store.objects[LEASE_KEY].body, LEASE_KEY)


async def test_a_run_beside_a_living_one_is_refused_and_told_which_it_is(store: FakeStore) -> None:
    first = run(store, "first")
    await begin(first)
    async with waiting(store, run(store, "second")) as second:
        store.now += 1
        assert await first.renew() is None
        with pytest.raises(KeepstepError, match="another run is alive at this destination: process of first") as caught:
            await second
    assert caught.value.kind is ErrorKind.BAD_CONFIGURATION
    assert "--take-over" in caught.value.hint
    assert "--attempt" in caught.value.hint
    assert holder(store) == lease("first")


class BusyStore(FakeStore):
    """Others come between any two of its answers."""

    async def head(self, key: str) -> ObjectInfo:
        await asyncio.sleep(0)
        return await super().head(key)

    async def get(self, key: str, *, limit_bytes: int, fresh: bool = False) -> bytes:
        await asyncio.sleep(0)
        return await super().get(key, limit_bytes=limit_bytes, fresh=fresh)

    async def put(self, key: str, body: bytes, *, if_absent: bool = False) -> None:
        await asyncio.sleep(0)
        await super().put(key, body, if_absent=if_absent)


async def live(store: FakeStore, of_run: RunLease) -> None:
    """Begin, and renew the lease for as long as the other starts wait."""
    async with of_run.held(take_over=False):
        for _ in range(30):
            await asyncio.sleep(0.1)
            store.now += 1
            await of_run.renew()


@pytest.mark.parametrize("conditional_put", [True, False])
@pytest.mark.parametrize("before", ["nothing", "an expired lease", "one that is given back", "one that expires"])
async def test_of_runs_that_start_at_once_one_begins(before: str, conditional_put: bool) -> None:
    store = BusyStore(conditional_put=conditional_put)
    first = run(store, "first")
    if before != "nothing":
        await begin(first)
        store.now += {"an expired lease": EXPIRY_SECONDS, "one that expires": EXPIRY_SECONDS - 1}.get(before, 0)
    starts = [asyncio.create_task(live(store, run(store, name))) for name in ("second", "third")]
    if before == "one that is given back":
        await somebody_waits(store)
        await first.release()
    async with asyncio.timeout(HANG_SECONDS):
        outcomes = await asyncio.gather(*starts, return_exceptions=True)
    alive = f"another run is alive at this destination: {holder(store).holder}"
    assert sorted(map(str, outcomes)) == sorted(["None", alive])


async def test_a_renewal_in_the_last_moment_is_seen(store: FakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run(store, "first")
    await begin(first)
    store.now += EXPIRY_SECONDS - 0.5
    sleep = asyncio.sleep

    async def sleep_while_it_is_renewed(seconds: float) -> None:
        await sleep(seconds)
        store.now += 1
        await first.renew()

    # In the only sleep, which ends after the expiry.
    monkeypatch.setattr(asyncio, "sleep", sleep_while_it_is_renewed)
    with pytest.raises(KeepstepError, match="another run is alive at this destination: process of first"):
        await begin(run(store, "second"))


async def test_a_renewal_that_hangs_is_tried_again_before_the_lease_expires(
    store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_lease, "_RENEWAL_TIMEOUT_SECONDS", 0.05)
    slept: list[float] = []
    renewals = 0

    async def renew() -> None:
        nonlocal renewals
        renewals += 1
        if renewals == 2:
            await asyncio.Event().wait()

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            raise asyncio.CancelledError

    monkeypatch.setattr(asyncio, "sleep", sleep)
    with pytest.raises(asyncio.CancelledError):
        await run_lease.renew_until_cancelled(renew, lambda other: None)
    assert slept == [15.0, 2.0, 15.0]


async def test_a_lease_that_is_given_back_lets_the_next_run_begin(store: FakeStore) -> None:
    first = run(store, "first")
    await begin(first)
    async with waiting(store, run(store, "second")) as second:
        await first.release()
        await second
    assert holder(store) == lease("second")


async def test_a_lease_that_nobody_renewed_for_long_holds_up_nobody(store: FakeStore) -> None:
    await begin(run(store, "first"))
    store.now += EXPIRY_SECONDS
    begun = asyncio.get_running_loop().time()
    await begin(run(store, "second"))
    assert asyncio.get_running_loop().time() - begun < EXPIRY_SECONDS / 2
    assert holder(store) == lease("second")


async def test_a_lease_that_nobody_renews_is_taken_when_it_expires(store: FakeStore) -> None:
    await begin(run(store, "first"))
    store.now += EXPIRY_SECONDS - 2
    async with waiting(store, run(store, "second")) as second:
        await second
    assert holder(store) == lease("second")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (lease("here", attempt="one"), lease("here", attempt="two")),
        (lease("here"), lease("here")),
        (lease("here", attempt="job"), lease("there", attempt="job")),
    ],
    ids=["another start on the volume", "the same without attempts", "another node of the attempt"],
)
async def test_what_is_the_same_run_never_waits(first: Lease, second: Lease, store: FakeStore) -> None:
    await begin(RunLease(store, first, renews=True))
    await begin(RunLease(store, second, renews=True))
    assert LEASE_CLOCK_KEY not in store.objects
    assert holder(store) == second


async def test_an_empty_attempt_is_nobodys(store: FakeStore) -> None:
    assert not lease("first").is_of_same_run(lease("second"))


async def test_a_person_may_let_a_run_take_over_and_the_other_one_hears_of_it(store: FakeStore) -> None:
    first = run(store, "first")
    await begin(first)
    await begin(run(store, "second"), take_over=True)
    assert await first.renew() == lease("second")
    await first.release()
    assert holder(store) == lease("second")


async def test_other_nodes_of_a_run_are_refused_as_well_and_write_nothing(store: FakeStore) -> None:
    await begin(run(store, "node-1", attempt="mine", renews=False))
    assert LEASE_KEY not in store.objects
    first = run(store, "first")
    await begin(first)
    async with waiting(store, run(store, "node-1", attempt="mine", renews=False)) as node:
        store.now += 1
        await first.renew()
        with pytest.raises(KeepstepError, match="another run is alive"):
            await node
    assert holder(store) == lease("first")
    await begin(run(store, "node-0", attempt="mine"), take_over=True)
    await begin(run(store, "node-1", attempt="mine", renews=False))
    await run(store, "node-1", attempt="mine", renews=False).release()
    assert holder(store) == lease("node-0", attempt="mine")


async def test_a_damaged_lease_is_replaced(store: FakeStore) -> None:
    await store.put(LEASE_KEY, b"{}")
    await begin(run(store, "first"))
    assert holder(store) == lease("first")


@pytest.mark.parametrize("after_acting", [True, False])
async def test_a_write_in_doubt_is_looked_up(after_acting: bool, store: FakeStore) -> None:
    store.fail("put", ErrorKind.TIMED_OUT, after_acting=after_acting)
    await begin(run(store, "first"))
    assert holder(store) == lease("first")


async def test_a_restore_that_fails_gives_the_lease_back(store: FakeStore) -> None:
    async def restore() -> None:
        async with run(store, "first").held(take_over=False):
            assert holder(store) == lease("first")
            raise RuntimeError("the disk is full")

    with pytest.raises(RuntimeError, match="the disk is full"):
        await restore()
    assert LEASE_KEY not in store.objects


async def test_a_store_that_refuses_the_lease_says_so(store: FakeStore) -> None:
    store.fail("put", ErrorKind.ACCESS_DENIED)
    with pytest.raises(StoreError):
        await begin(run(store, "first"))

"""All pods of an attempt resume from the same checkpoint, whatever is committed or breaks meanwhile."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.fakes.fake_store import FakeStore
from tests.harness.bounds import HANG_SECONDS
from tests.restore.one_output import restore
from tests.restore.stored_checkpoints import DAMAGE, all_files, flip_byte, store_checkpoint

from keepstep_agent.core.errors import ErrorKind, RequestError, StoreError
from keepstep_agent.core.policies.restore_choice import Pin, decode_pin, encode_pin
from keepstep_agent.core.stored.object_layout import file_key, marker_key, parse_marker_key, pin_key
from keepstep_agent.ports import ObjectInfo, ObjectStore
from keepstep_agent.restore.init_step import Restored


async def pod(
    store: ObjectStore,
    folder: Path,
    node_rank: int,
    *,
    attempt: str = "job-1",
    named: bool = True,
    pin_timeout_seconds: float = HANG_SECONDS,
) -> Restored | None:
    """`named`: something tells the pods of the job apart."""
    volume = folder / f"pod-{node_rank}"
    return await restore(
        store,
        checkpoint_directory=volume / "checkpoints",
        volume=volume,
        state_directory=volume / "state",
        attempt=attempt,
        place=str(node_rank) if named else "",
        node_rank=node_rank,
        pin_timeout_seconds=pin_timeout_seconds,
    )


async def pinned(store: ObjectStore, attempt: str = "job-1") -> Pin:
    return decode_pin(await store.get(pin_key(attempt, 0), limit_bytes=10_000), pin_key(attempt, 0))


@pytest.fixture(params=[True, False], ids=["conditional puts", "no conditional puts"])
async def any_store(request: pytest.FixtureRequest) -> AsyncIterator[FakeStore]:
    store = FakeStore(conditional_put=request.param)
    yield store
    await store.close()


def step_of(restored: Restored | None) -> int | None:
    return restored.step if restored else None


async def test_the_first_choice_is_written_down_and_later_pods_follow_it(any_store: FakeStore, tmp_path: Path) -> None:
    info = await store_checkpoint(any_store, 100)
    assert step_of(await pod(any_store, tmp_path, 0)) == 100
    assert await pinned(any_store) == Pin(attempt="job-1", markers=(marker_key(info),))
    await store_checkpoint(any_store, 200)
    assert step_of(await pod(any_store, tmp_path, 1)) == 100


async def test_a_new_attempt_chooses_anew(any_store: FakeStore, tmp_path: Path) -> None:
    await store_checkpoint(any_store, 100)
    await pod(any_store, tmp_path, 0)
    await store_checkpoint(any_store, 200)
    assert step_of(await pod(any_store, tmp_path, 0, attempt="job-2")) == 200


async def test_a_fresh_start_is_a_choice_that_others_follow(any_store: FakeStore, tmp_path: Path) -> None:
    assert await pod(any_store, tmp_path, 0) is None
    assert (await pinned(any_store)).markers == ()
    await store_checkpoint(any_store, 100)
    assert await pod(any_store, tmp_path, 1) is None


@pytest.mark.parametrize("what", ["a flipped byte", "a missing manifest"])
async def test_pods_that_start_together_fall_back_to_the_same_checkpoint(
    what: str, any_store: FakeStore, tmp_path: Path
) -> None:
    await store_checkpoint(any_store, 100)
    await DAMAGE[what](any_store, await store_checkpoint(any_store, 200))
    async with asyncio.timeout(HANG_SECONDS):
        restored = await asyncio.gather(*(pod(any_store, tmp_path, rank) for rank in range(4)))
    assert [step_of(one) for one in restored] == [100] * 4


async def test_a_pod_that_chose_otherwise_drops_its_choice_and_fetches_the_pinned_one(
    store: FakeStore, tmp_path: Path
) -> None:
    await store_checkpoint(store, 100)
    racing = _CommitsWhileListing(store)
    assert step_of(await pod(racing, tmp_path, 1)) == 100
    checkpoints = tmp_path / "pod-1" / "checkpoints"
    assert {path.name for path in checkpoints.iterdir()} == {"checkpoint-100"}
    assert not list((tmp_path / "pod-1" / ".keepstep" / "incoming").iterdir())


class _CommitsWhileListing(FakeStore):
    """Another pod pins the old checkpoint and a straggler commits a newer one, after this pod has looked for a pin."""

    def __init__(self, store: FakeStore) -> None:
        super().__init__()
        self.objects = store.objects
        self._raced = False

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        if not self._raced:
            self._raced = True
            key = next(key for key in self.objects if key.startswith(".keepstep/commits/"))
            pin = Pin(attempt="job-1", markers=(key,))
            await self.put(pin_key("job-1", 0), encode_pin(pin))
            await store_checkpoint(self, 200)
        async for one in super().list(prefix):
            yield one


async def test_a_lost_answer_to_the_pin_is_settled_by_reading_it_back(store: FakeStore, tmp_path: Path) -> None:
    await store_checkpoint(store, 100)
    store.fail("put", ErrorKind.TIMED_OUT, after_acting=True)
    assert step_of(await pod(store, tmp_path, 0)) == 100
    assert steps_of(await pinned(store)) == [100]


async def test_a_pin_that_cannot_be_written_is_an_error(store: FakeStore, tmp_path: Path) -> None:
    await store_checkpoint(store, 100)
    store.fail("put", ErrorKind.ACCESS_DENIED)
    with pytest.raises(StoreError) as caught:
        await pod(store, tmp_path, 0)
    assert caught.value.kind is ErrorKind.ACCESS_DENIED
    assert not list((tmp_path / "pod-0" / "checkpoints").iterdir())


async def _train(store: FakeStore, step: int, run: str) -> None:
    """A run of the job commits a checkpoint, some time later."""
    store.now += 60.0
    await store_checkpoint(store, step, save=f"{run}-c{step:06d}")
    store.now += 60.0


@pytest.mark.parametrize("named", [True, False])
async def test_a_job_that_is_started_again_as_the_same_attempt_goes_on_from_its_newest_checkpoint(
    any_store: FakeStore, tmp_path: Path, named: bool
) -> None:
    """As a JobSet does that is suspended and resumed, and any job whose containers are restarted in place."""
    assert [await pod(any_store, tmp_path / "first", node, named=named) for node in range(2)] == [None, None]
    for number, (run, step) in enumerate((("aaaaaaaa", 100), ("bbbbbbbb", 200))):
        await _train(any_store, step, run)
        restored = [await pod(any_store, tmp_path / f"next-{number}", node, named=named) for node in range(2)]
        assert [step_of(one) for one in restored] == [step, step]


async def test_a_straggler_of_the_run_before_splits_no_start(any_store: FakeStore, tmp_path: Path) -> None:
    await _train(any_store, 100, "aaaaaaaa")
    assert step_of(await pod(any_store, tmp_path, 0)) == 100
    await _train(any_store, 110, "aaaaaaaa")
    assert step_of(await pod(any_store, tmp_path, 1)) == 100
    # What it has saved is not lost: the next start takes it, although nothing was committed by this one.
    restored = [await pod(any_store, tmp_path / "again", node) for node in range(2)]
    assert [step_of(one) for one in restored] == [110, 110]


async def test_one_pod_that_is_replaced_gets_the_newest_and_the_next_start_of_all_too(
    store: FakeStore, tmp_path: Path
) -> None:
    await _train(store, 100, "aaaaaaaa")
    for node in range(4):
        await pod(store, tmp_path, node)
    await _train(store, 200, "bbbbbbbb")
    assert step_of(await pod(store, tmp_path / "replaced", 2)) == 200
    await _train(store, 300, "cccccccc")
    restored = [await pod(store, tmp_path / "again", node) for node in range(4)]
    assert [step_of(one) for one in restored] == [300] * 4


async def test_a_pod_that_is_evicted_while_it_restores_joins_its_peers_again(store: FakeStore, tmp_path: Path) -> None:
    await _train(store, 100, "aaaaaaaa")
    assert step_of(await pod(store, tmp_path, 0)) == 100
    store.fail("put", ErrorKind.STORE_FAILED, times=1)
    with pytest.raises(StoreError):
        # It has the checkpoint, and ends before its place is taken.
        await pod(store, tmp_path, 1)
    await _train(store, 110, "aaaaaaaa")
    assert step_of(await pod(store, tmp_path / "again", 1)) == 100


async def test_a_replaced_pod_waits_for_no_node_0_that_trains(tmp_path: Path) -> None:
    store = FakeStore(conditional_put=False)
    await _train(store, 100, "aaaaaaaa")
    for node in range(2):
        await pod(store, tmp_path, node)
    await _train(store, 200, "bbbbbbbb")
    assert step_of(await pod(store, tmp_path / "replaced", 1, pin_timeout_seconds=0.1)) == 200
    await store.close()


async def test_a_place_that_cannot_be_part_of_a_key_is_refused(store: FakeStore, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="place"):
        await restore(
            store,
            checkpoint_directory=tmp_path / "checkpoints",
            volume=tmp_path,
            state_directory=tmp_path / "state",
            attempt="job-1",
            place="../up",
        )


async def test_without_conditional_puts_the_others_wait_for_node_0(tmp_path: Path) -> None:
    async with asyncio.timeout(HANG_SECONDS):
        store = _SaysWhenWaiting()
        await store_checkpoint(store, 100)
        follower = asyncio.create_task(pod(store, tmp_path, 1))
        await store.waiting.wait()
        assert not follower.done()
        await store_checkpoint(store, 200)
        await pod(store, tmp_path, 0)
        assert step_of(await follower) == 200
    await store.close()


class _SaysWhenWaiting(FakeStore):
    """`waiting` is set when a pod asks for a pin, after it has its checkpoint."""

    def __init__(self) -> None:
        super().__init__(conditional_put=False)
        self.waiting = asyncio.Event()

    async def get(self, key: str, *, limit_bytes: int, fresh: bool = False) -> bytes:
        if key == pin_key("job-1", 0) and any(method == "probe" for method, _ in self.calls):
            self.waiting.set()
        return await super().get(key, limit_bytes=limit_bytes, fresh=fresh)


async def test_a_node_0_that_never_decides_ends_the_wait_with_a_hint(tmp_path: Path) -> None:
    store = FakeStore(conditional_put=False)
    await store_checkpoint(store, 100)
    with pytest.raises(StoreError, match="node 0 has not decided within") as caught:
        await pod(store, tmp_path, 1, pin_timeout_seconds=0.1)
    assert caught.value.kind is ErrorKind.TIMED_OUT
    assert "node rank 0" in caught.value.hint
    assert not list((tmp_path / "pod-1" / "checkpoints").iterdir())
    await store.close()


async def test_a_follower_never_takes_another_checkpoint_than_the_pinned_one_even_if_that_is_damaged(
    any_store: FakeStore, tmp_path: Path
) -> None:
    await store_checkpoint(any_store, 50)
    info = await store_checkpoint(any_store, 100)
    await pod(any_store, tmp_path, 0)
    await flip_byte(any_store, file_key(info, "model-0.safetensors"), 5)
    with pytest.raises(
        StoreError, match=r"step 100 .* this start of job-1 resumes from, .*model-0\.safetensors"
    ) as caught:
        await pod(any_store, tmp_path, 1)
    assert "new attempt" in caught.value.hint
    assert not list((tmp_path / "pod-1" / "checkpoints").iterdir())


async def test_a_pinned_checkpoint_that_is_gone_is_an_error(any_store: FakeStore, tmp_path: Path) -> None:
    await store_checkpoint(any_store, 50)
    info = await store_checkpoint(any_store, 100)
    await pod(any_store, tmp_path, 0)
    await any_store.delete(marker_key(info))
    with pytest.raises(StoreError, match="no longer at the destination"):
        await pod(any_store, tmp_path, 1)


async def test_a_pin_that_cannot_be_read_is_an_error_and_not_overruled(any_store: FakeStore, tmp_path: Path) -> None:
    await store_checkpoint(any_store, 100)
    await any_store.put(pin_key("job-1", 0), b"{")
    with pytest.raises(StoreError, match=r"\.keepstep/resume/job-1/000000\.json"):
        await pod(any_store, tmp_path, 0)


async def test_pods_agree_on_real_stores(real_store: ObjectStore, tmp_path: Path) -> None:
    await store_checkpoint(real_store, 100)
    async with asyncio.timeout(HANG_SECONDS):
        restored = await asyncio.gather(*(pod(real_store, tmp_path, rank) for rank in range(2)))
    assert [step_of(one) for one in restored] == [100, 100]
    assert steps_of(await pinned(real_store)) == [100]
    files = (tmp_path / "pod-1" / "checkpoints" / "checkpoint-100").rglob("*")
    assert {path.name for path in files if path.is_file()} == {Path(path).name for path in all_files(100)}


_OTHER = ".keepstep/commits/999999999998.t@0123456789ab.json"


def steps_of(pin: Pin) -> list[int]:
    return [found[0] for marker in pin.markers if (found := parse_marker_key(marker))]


def test_a_pin_survives_its_encoding() -> None:
    for pin in (
        Pin(attempt="a"),
        Pin(attempt="a", markers=(".keepstep/commits/999999999996.s.json", _OTHER)),
    ):
        assert decode_pin(encode_pin(pin), "key") == pin

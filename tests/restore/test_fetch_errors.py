"""The lazy restore on the agent's side: damage, errors that pass, and which checkpoints are offered."""

from pathlib import Path

import pytest
from tests.fakes.fake_store import FakeStore
from tests.harness.bounds import HANG_SECONDS
from tests.restore.fetching_pod import on_disk, pod
from tests.restore.stored_checkpoints import DAMAGE, all_files, flip_byte, store_checkpoint

from keepstep_agent.core.errors import ErrorKind, RequestError, StoreError
from keepstep_agent.core.stored.object_layout import file_key, marker_key
from keepstep_agent.restore.partial_copy import FileRange


@pytest.mark.parametrize("what", sorted(DAMAGE))
async def test_a_damaged_checkpoint_is_told_and_not_offered_again(what: str, store: FakeStore, volume: Path) -> None:
    await store_checkpoint(store, 100)
    info = await store_checkpoint(store, 200)
    await DAMAGE[what](store, info)
    async with pod(store, volume) as one:
        assert await one.offered() == [200, 100]
        with pytest.raises(StoreError) as caught:
            await one.fetch(info)
        assert caught.value.kind is ErrorKind.CHECKPOINT_CORRUPT
        assert await one.offered() == [100]
        with pytest.raises(StoreError):
            await one.fetch(info)
    assert not (volume / "checkpoints" / "checkpoint-200").exists()


async def test_if_all_are_damaged_that_is_an_error_and_no_fresh_start(store: FakeStore, volume: Path) -> None:
    info = await store_checkpoint(store, 100)
    await flip_byte(store, file_key(info, "model-0.safetensors"), 5)
    async with pod(store, volume) as one:
        with pytest.raises(StoreError):
            await one.fetch(info)
        with pytest.raises(StoreError) as caught:
            await one.offered()
    assert caught.value.kind is ErrorKind.CHECKPOINT_CORRUPT


async def test_a_store_that_fails_for_a_while_only_takes_longer(store: FakeStore, volume: Path) -> None:
    info = await store_checkpoint(store, 100)
    async with pod(store, volume) as one:
        store.fail("list", ErrorKind.UNREACHABLE)
        assert await one.offered() == [100]
        store.fail("get", ErrorKind.TIMED_OUT)
        store.fail("get_into", ErrorKind.STORE_FAILED, times=3)
        assert on_disk((await one.fetch(info)).path) == all_files(100)


async def test_a_store_that_does_not_answer_is_no_empty_destination(store: FakeStore, volume: Path) -> None:
    store.fail("list", ErrorKind.UNREACHABLE, times=1000)
    async with pod(store, volume) as one:
        found = await one.fetches.restorable(None, 0.0)
        assert found.committed is None
        found = await one.fetches.restorable(None, 0.1)
    assert found.committed is None
    assert "fails because a test wants it to" in found.storage_error


async def test_an_unknown_save_or_file_is_the_callers_mistake(store: FakeStore, volume: Path) -> None:
    info = await store_checkpoint(store, 100)
    async with pod(store, volume) as one:
        with pytest.raises(RequestError) as caught:
            await one.fetches.fetch("nobody-1", [], whole=True, wait_seconds=HANG_SECONDS)
        assert caught.value.kind is ErrorKind.UNKNOWN_SAVE
        with pytest.raises(RequestError) as caught:
            await one.fetch(info, FileRange(path="../../etc/passwd"))
        assert caught.value.kind is ErrorKind.FILE_MISSING
        assert on_disk((await one.fetch(info)).path) == all_files(100)


async def test_an_agent_that_was_started_again_waits_for_the_store_too(store: FakeStore, volume: Path) -> None:
    info = await store_checkpoint(store, 100)
    async with pod(store, volume) as one:
        store.fail("list", ErrorKind.UNREACHABLE, times=2)
        assert on_disk((await one.fetch(info)).path) == all_files(100)


async def test_a_pod_offers_twenty_checkpoints_and_not_its_whole_history(store: FakeStore, volume: Path) -> None:
    for step in range(30):
        await store_checkpoint(store, step, ranks=[{"a": b"b"}])
    async with pod(store, volume) as one:
        assert await one.offered() == list(range(29, 9, -1))


async def test_a_checkpoint_that_is_deleted_meanwhile_is_not_called_damaged(store: FakeStore, volume: Path) -> None:
    await store_checkpoint(store, 100)
    info = await store_checkpoint(store, 200)
    async with pod(store, volume) as one:
        await one.offered()
        await store.delete(marker_key(info))
        with pytest.raises(StoreError):
            await one.fetch(info)
        assert await one.offered() == [100]
    assert not [key for method, key in store.calls if method == "put" and "damaged" in key]

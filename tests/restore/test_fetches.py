"""The lazy restore on the agent's side: what is fetched, what is not, and when it goes."""

import asyncio
import errno
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from structlog.testing import capture_logs
from tests.fakes.fake_store import FakeStore
from tests.harness.bounds import HANG_SECONDS
from tests.restore.fetching_pod import announced, fetched, on_disk, pod, until
from tests.restore.one_output import restore
from tests.restore.stored_checkpoints import (
    PART_BYTES,
    all_files,
    rank_files,
    store_checkpoint,
    store_packed_checkpoint,
)

from keepstep_agent.adapters.records import recorded_save
from keepstep_agent.adapters.volume.shared_volume import Folder
from keepstep_agent.core.agent.events import Committed
from keepstep_agent.core.errors import ErrorKind, StoreError
from keepstep_agent.core.model import SaveInfo
from keepstep_agent.ports import ObjectStore
from keepstep_agent.restore import partial_copy
from keepstep_agent.restore.partial_copy import FileRange
from keepstep_api.names import RESUMED


async def test_a_whole_checkpoint_gets_its_place_and_its_record(real_store: ObjectStore, volume: Path) -> None:
    info = await store_checkpoint(real_store, 100, world_size=2)
    async with pod(real_store, volume) as one:
        done = await one.fetch(info)
    assert done.path == volume / "checkpoints" / "checkpoint-100"
    assert on_disk(done.path) == all_files(100, ranks=2)
    assert recorded_save(volume, ".keepstep/records/checkpoint-100.json") == info.save
    assert recorded_save(volume / "state", RESUMED) == info.save


async def test_ranges_are_fetched_in_parts_and_nothing_else_is(store: FakeStore, volume: Path) -> None:
    info = await store_checkpoint(store, 100)
    async with pod(store, volume) as one:
        store.calls.clear()
        done = await one.fetch(
            info,
            FileRange(path="model-0.safetensors", offset_bytes=PART_BYTES - 1, length_bytes=2),
            FileRange(path="rng_state_0.pth"),
            FileRange(path="empty-0"),
        )
        assert done.path is not None
        found = (done.path / "model-0.safetensors").read_bytes()
        assert len(found) == 5 * PART_BYTES + 77
        assert found[: 2 * PART_BYTES] == rank_files(100)["model-0.safetensors"][: 2 * PART_BYTES]
        assert (done.path / "rng_state_0.pth").read_bytes() == rank_files(100)["rng_state_0.pth"]
        assert (done.path / "empty-0").read_bytes() == b""
        assert sorted(fetched(store)) == ["model-0.safetensors", "model-0.safetensors", "rng_state_0.pth"]
        assert not list((volume / "checkpoints").iterdir())
        # The rest, later: what is here is not fetched again.
        store.calls.clear()
        assert on_disk((await one.fetch(info)).path) == all_files(100)
        assert sorted(fetched(store)) == [*["model-0.safetensors"] * 4, "state-0.pt"]


async def test_ranges_are_fetched_in_the_order_in_which_they_were_asked_for(store: FakeStore, volume: Path) -> None:
    info = await store_checkpoint(store, 100, ranks=[{path: path.encode() for path in "abcd"}])
    async with pod(store, volume) as one:
        await one.offered()
        store.calls.clear()
        await one.fetch(info, *(FileRange(path=path) for path in "dbcb"))
        assert fetched(store) == ["d", "b", "c"]


@pytest.mark.parametrize("files", [{"a": b"", "d/b": b""}, {}], ids=["only empty ones", "none"])
async def test_a_checkpoint_without_bytes_is_guessed_and_fetched(
    store: FakeStore, volume: Path, files: dict[str, bytes]
) -> None:
    info = await store_checkpoint(store, 100, ranks=[files])
    with capture_logs() as log:
        async with pod(store, volume, mode="lazy") as one:
            await one.fetches.fetch(info.save, [], whole=False, wait_seconds=HANG_SECONDS)
            assert on_disk((await one.fetch(info)).path) == files
    assert [line for line in log if line["event"] == "fetch.failed"] == []


async def test_what_waits_for_the_store_ends_when_the_whole_checkpoint_is_found_in_its_place(
    store: FakeStore, volume: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel lets nobody link to files of others, so parts of them are fetched."""

    def no_links(*_: object) -> None:
        raise PermissionError(errno.EPERM, "not permitted")

    async def hang(*_: object, **__: object) -> None:
        await asyncio.Event().wait()

    info = await store_checkpoint(store, 100)
    async with pod(store, volume) as one:
        await one.fetch(info)
    monkeypatch.setattr(Folder, "link_open_file", no_links)
    monkeypatch.setattr(store, "get_into", hang)
    async with pod(store, volume) as one:
        waiting = asyncio.create_task(one.fetch(info, FileRange(path="rng_state_0.pth")))
        await until(lambda: one.fetches.progress() is not None)
        assert (await one.fetch(info)).path is not None
        assert (await waiting).path is not None


async def test_whoever_asks_for_nothing_is_told_the_files_and_the_place(store: FakeStore, volume: Path) -> None:
    info = await store_checkpoint(store, 100, world_size=2)
    async with pod(store, volume) as one:
        store.calls.clear()
        told = await one.fetches.fetch(info.save, [], whole=False, wait_seconds=HANG_SECONDS)
        assert told.files is not None
        assert set(told.files.paths()) == set(all_files(100, ranks=2))
        assert told.path == volume / "checkpoints" / "checkpoint-100"
        assert fetched(store) == []
        assert not told.path.exists()
        assert not (volume / "state" / RESUMED).exists(), "it is not what the run resumes from yet"


async def test_a_volume_is_measured_for_what_is_asked_for_the_first_time(
    store: FakeStore, volume: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes seconds per million files."""
    measured = 0

    def check_room(*arguments: object) -> None:
        nonlocal measured
        measured += 1

    monkeypatch.setattr(partial_copy, "check_room", check_room)
    info = await store_checkpoint(store, 100)
    async with pod(store, volume) as one:
        for _ in range(3):
            await one.fetch(info, FileRange(path="model-0.safetensors"))
    assert measured == 1


async def test_packed_files_are_fetched_by_their_pack(store: FakeStore, volume: Path) -> None:
    packed = {f"small/{number:03d}": bytes([number]) * 50 for number in range(60)}
    info = await store_packed_checkpoint(store, 100, alone={"large": b"x" * 100}, packed=packed)
    async with pod(store, volume) as one:
        done = await one.fetch(info, FileRange(path="small/003"))
        assert done.path is not None
        assert (done.path / "small/003").read_bytes() == packed["small/003"]
        assert not (done.path / "small/059").exists()
        assert on_disk((await one.fetch(info)).path) == {"large": b"x" * 100, **packed}


async def test_what_a_killed_agent_has_fetched_is_kept(store: FakeStore, volume: Path) -> None:
    info = await store_checkpoint(store, 100)
    async with pod(store, volume) as one:
        done = await one.fetch(info, FileRange(path="model-0.safetensors", length_bytes=2 * PART_BYTES))
    assert done.path is not None
    model = done.path / "model-0.safetensors"
    # A byte that was lost with the kill: that part alone is fetched again.
    with model.open("r+b") as file:
        file.seek(PART_BYTES)
        file.write(b"?" if file.read(1) != b"?" else b"!")
    async with pod(store, volume) as one:
        store.calls.clear()
        assert on_disk((await one.fetch(info)).path) == all_files(100)
    assert fetched(store).count("model-0.safetensors") == 5


async def own_part(store: FakeStore, volume: Path, rank: int) -> SaveInfo:
    """A checkpoint of two ranks, of which this pod's has contributed its files and has them still."""
    info = await store_checkpoint(store, 100, world_size=2)
    place = volume / "checkpoints" / "checkpoint-100"
    for path, body in rank_files(100, rank).items():
        (place / path).parent.mkdir(parents=True, exist_ok=True)
        (place / path).write_bytes(body)
    records = volume / ".keepstep" / "records"
    records.mkdir(parents=True)
    (records / "checkpoint-100.json").write_text(f'{{"save": "{info.save}"}}')
    return info


async def test_what_this_pod_contributed_is_not_fetched_again(store: FakeStore, volume: Path) -> None:
    info = await own_part(store, volume, rank=1)
    async with pod(store, volume) as one:
        store.calls.clear()
        done = await one.fetch(info, *(FileRange(path=path) for path in rank_files(100, 1)))
        assert done.path is not None
        assert on_disk(done.path) == {**rank_files(100, 1), "empty-0": b""}
        assert fetched(store) == []
        assert on_disk((await one.fetch(info)).path) == all_files(100, ranks=2)
    assert set(fetched(store)) == {"model-0.safetensors", "state-0.pt", "rng_state_0.pth"}


async def test_a_restore_before_the_program_keeps_what_this_pod_contributed(store: FakeStore, volume: Path) -> None:
    await own_part(store, volume, rank=1)
    store.calls.clear()
    restored = await restore(
        store, checkpoint_directory=volume / "checkpoints", volume=volume, state_directory=volume / "state"
    )
    assert restored is not None
    assert on_disk(restored.path) == all_files(100, ranks=2)
    assert set(fetched(store)) == {"model-0.safetensors", "state-0.pt", "rng_state_0.pth"}


async def test_a_damaged_file_of_this_pod_is_fetched_and_left_as_it_is(store: FakeStore, volume: Path) -> None:
    info = await own_part(store, volume, rank=1)
    damaged = volume / "checkpoints" / "checkpoint-100" / "model-1.safetensors"
    damaged.write_bytes(bytes(5 * PART_BYTES + 77))
    async with pod(store, volume) as one:
        done = await one.fetch(info, FileRange(path="model-1.safetensors", length_bytes=10))
        assert done.path is not None
        assert (done.path / "model-1.safetensors").read_bytes()[:PART_BYTES] != bytes(PART_BYTES)
        assert damaged.read_bytes() == bytes(5 * PART_BYTES + 77)


async def test_a_pack_is_fetched_though_this_pod_still_has_one_of_its_files(store: FakeStore, volume: Path) -> None:
    packed = {f"small/{number}": b"%d" % number for number in range(3)}
    info = await store_packed_checkpoint(store, 100, alone=rank_files(100), packed=packed)
    place = volume / "checkpoints" / "checkpoint-100"
    (place / "small").mkdir(parents=True)
    (place / "small" / "1").write_bytes(packed["small/1"])
    (records := volume / ".keepstep" / "records").mkdir(parents=True)
    (records / "checkpoint-100.json").write_text(f'{{"save": "{info.save}"}}')
    async with pod(store, volume) as one:
        done = await one.fetch(info, FileRange(path="small/2"))
        assert done.path is not None
        assert (done.path / "small" / "2").read_bytes() == packed["small/2"]
        assert on_disk((await one.fetch(info)).path) == {**all_files(100), **packed}


async def test_a_whole_local_copy_is_verified_and_not_fetched(store: FakeStore, volume: Path) -> None:
    info = await store_checkpoint(store, 100)
    await restore(store, checkpoint_directory=volume / "checkpoints", volume=volume, state_directory=volume / "state")
    async with pod(store, volume) as one:
        store.calls.clear()
        assert on_disk((await one.fetch(info)).path) == all_files(100)
    assert fetched(store) == []


async def test_another_checkpoint_replaces_the_one_being_fetched(store: FakeStore, volume: Path) -> None:
    first, second = await store_checkpoint(store, 100), await store_checkpoint(store, 200)
    async with pod(store, volume) as one:
        await one.fetch(second, FileRange(path="rng_state_0.pth"))
        done = await one.fetch(first, FileRange(path="rng_state_0.pth"))
        assert [found.name for found in (volume / ".keepstep" / "incoming").iterdir()] == [first.save]
        assert on_disk(done.path)["rng_state_0.pth"] == rank_files(100)["rng_state_0.pth"]


def committed(save: str) -> Committed:
    return Committed(at=0.0, work=cast(Any, SimpleNamespace(save=save)))


@pytest.mark.parametrize("step", [1, 200], ids=["of a run that began anew", "of the next steps"])
async def test_what_was_fetched_goes_when_the_trainer_has_saved(step: int, store: FakeStore, volume: Path) -> None:
    info = await store_checkpoint(store, 100)
    newer = replace(info, save="new-1", name=f"checkpoint-{step}", step=step)
    incoming = volume / ".keepstep" / "incoming"
    nobody = cast(Any, None)
    async with pod(store, volume) as one:
        done = await one.fetch(info, FileRange(path="rng_state_0.pth"))
        # One that was announced before this start is committed while its ranks read.
        one.fetches.hear(nobody, committed("of-before-1"))
        assert on_disk(done.path)
        one.fetches.hear(nobody, announced(newer))
        one.fetches.hear(nobody, committed("new-1"))
        await until(lambda: not list(incoming.iterdir()))


async def test_what_a_fetch_that_failed_has_left_goes_too(store: FakeStore, volume: Path) -> None:
    info = await store_checkpoint(store, 100)
    newer = replace(info, save="new-1", name="checkpoint-200", step=200)
    incoming = volume / ".keepstep" / "incoming"
    async with pod(store, volume) as one:
        await one.fetch(info, FileRange(path="rng_state_0.pth"))
        store.fail("get_into", ErrorKind.CHECKPOINT_CORRUPT, times=100)
        with pytest.raises(StoreError):
            await one.fetch(info)
        one.fetches.hear(cast(Any, None), announced(newer))
        one.fetches.hear(cast(Any, None), committed("new-1"))
        await until(lambda: not list(incoming.iterdir()))


async def test_requests_for_the_same_bytes_are_fetched_once(store: FakeStore, volume: Path) -> None:
    info = await store_checkpoint(store, 100)
    async with pod(store, volume) as one:
        store.calls.clear()
        answers = await asyncio.gather(*(one.fetch(info, FileRange(path="model-0.safetensors")) for _ in range(8)))
    assert {answer.path for answer in answers} == {volume / ".keepstep" / "incoming" / info.save}
    assert len(fetched(store)) == 6

"""The lazy restore on the agent's side: what is fetched, what is not, and what becomes of errors."""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from structlog.testing import capture_logs
from tests.fakes.fake_store import FakeStore
from tests.restore.stored_checkpoints import (
    DAMAGE,
    PART_BYTES,
    all_files,
    flip_byte,
    rank_files,
    store_checkpoint,
    store_packed_checkpoint,
)

from mooring_agent.adapters.records import recorded_save
from mooring_agent.core.agent.events import Announced, Committed
from mooring_agent.core.errors import ErrorKind, RequestError, StoreError, VolumeError
from mooring_agent.core.model import SaveInfo
from mooring_agent.core.settings.values import Settings, StoreSettings
from mooring_agent.core.stored.object_layout import file_key, marker_key
from mooring_agent.ports import ObjectStore
from mooring_agent.restore import partial_copy
from mooring_agent.restore.init_step import restore
from mooring_agent.restore.partial_copy import FileRange
from mooring_agent.runtime.work.fetches import Fetches, FetchProgress
from mooring_api.names import RESUMED

WAIT_SECONDS = 60.0


class Pod:
    """One pod's agent, as far as it restores."""

    def __init__(self, store: ObjectStore, volume: Path, fetches: Fetches) -> None:
        self.store, self.volume, self.fetches = store, volume, fetches

    async def fetch(self, info: SaveInfo, *ranges: FileRange) -> FetchProgress:
        return await self.fetches.fetch(info.save, ranges, whole=not ranges, wait_seconds=WAIT_SECONDS)

    async def offered(self) -> list[int]:
        found = await self.fetches.restorable(WAIT_SECONDS)
        assert found.committed is not None
        return [one.step for one in found.committed]


@asynccontextmanager
async def pod(
    store: ObjectStore, volume: Path, *, mode: str = "whole", place: str = "", node_rank: int = 0
) -> AsyncIterator[Pod]:
    settings = Settings(
        volume=str(volume),
        checkpoint_directory=f"{volume}/checkpoints",
        socket=f"{volume}/socket",
        state_directory=f"{volume}/state",
        store=StoreSettings(destination="s3://bucket/run"),
        restore=mode,
        place=place,
        node_rank=node_rank,
    )

    async def get() -> ObjectStore:
        return store

    volume.mkdir(exist_ok=True)  # noqa: ASYNC240 - a local disk
    with ThreadPoolExecutor(1) as disk:
        fetches = Fetches(store=cast(Any, SimpleNamespace(get=get)), settings=settings, disk=disk, guesses=True)
        running = asyncio.create_task(fetches.run())
        try:
            yield Pod(store, volume, fetches)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_SECONDS):
        while not holds():  # noqa: ASYNC110 - the disk tells nobody
            await asyncio.sleep(0.01)


def on_disk(path: Path | None) -> dict[str, bytes]:
    assert path is not None
    return {found.relative_to(path).as_posix(): found.read_bytes() for found in path.rglob("*") if found.is_file()}


def announced(info: SaveInfo) -> Announced:
    return Announced(at=0.0, info=info, rank=0, path="/checkpoint", files=(), local_world_size=1)


def fetched(store: FakeStore) -> list[str]:
    """The files whose bytes were read since `calls` was cleared, one entry per request."""
    return [key.rpartition("/")[2] for method, key in store.calls if method == "get_into"]


async def test_a_whole_checkpoint_gets_its_place_and_its_record(real_store: ObjectStore, volume: Path) -> None:
    info = await store_checkpoint(real_store, 100, world_size=2)
    async with pod(real_store, volume) as one:
        done = await one.fetch(info)
    assert done.path == volume / "checkpoints" / "checkpoint-100"
    assert on_disk(done.path) == all_files(100, ranks=2)
    assert recorded_save(volume, ".mooring/records/checkpoint-100.json") == info.save
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


async def test_whoever_asks_for_nothing_is_told_the_files_and_the_place(store: FakeStore, volume: Path) -> None:
    info = await store_checkpoint(store, 100, world_size=2)
    async with pod(store, volume) as one:
        store.calls.clear()
        told = await one.fetches.fetch(info.save, [], whole=False, wait_seconds=WAIT_SECONDS)
        assert set(told.files) == set(all_files(100, ranks=2))
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
    records = volume / ".mooring" / "records"
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


async def test_a_whole_local_copy_is_verified_and_not_fetched(store: FakeStore, volume: Path) -> None:
    info = await store_checkpoint(store, 100)
    await restore(store, checkpoint_directory=volume / "checkpoints", volume=volume, state_directory=volume / "state")
    async with pod(store, volume) as one:
        store.calls.clear()
        assert on_disk((await one.fetch(info)).path) == all_files(100)
    assert fetched(store) == []


async def test_an_agent_guesses_what_its_pod_needs(store: FakeStore, tmp_path: Path) -> None:
    await store_checkpoint(store, 100)
    async with pod(store, tmp_path / "one", mode="lazy"):
        await until(lambda: set(fetched(store)) == {"model-0.safetensors", "state-0.pt", "rng_state_0.pth"})
    await store_checkpoint(store, 200, world_size=2)
    store.calls.clear()
    async with pod(store, tmp_path / "second", mode="lazy", place="1", node_rank=1):
        await until(lambda: set(fetched(store)) == {"model-1.safetensors", "state-1.pt", "rng_state_1.pth"})


@pytest.mark.parametrize("options", [{"mode": "whole", "place": "0"}, {"mode": "lazy"}], ids=["whole", "no place"])
async def test_nothing_is_guessed_unless_it_is_lazy_and_one_of_many_is_known(
    options: dict[str, str], store: FakeStore, tmp_path: Path
) -> None:
    info = await store_checkpoint(store, 200, world_size=2)
    async with pod(store, tmp_path / "volume", mode=options["mode"], place=options.get("place", "")) as one:
        await one.fetch(info, FileRange(path="rng_state_1.pth"))
        await until(lambda: one.fetches.progress() is None)
    assert fetched(store) == ["rng_state_1.pth"]


@pytest.mark.parametrize("asks", [True, False], ids=["asks", "does not ask"])
async def test_a_program_that_begins_anew_without_asking_is_told_so(asks: bool, store: FakeStore, volume: Path) -> None:
    info = await store_checkpoint(store, 200)
    begun = replace(info, step=1, save="new-1", name="checkpoint-1")
    with capture_logs() as logs:
        async with pod(store, volume, mode="lazy") as one:
            await until(lambda: len(fetched(store)) > 0)
            if asks:
                await one.offered()
            for _ in range(2):
                one.fetches.hear(cast(Any, None), announced(begun))
    assert [line["event"] for line in logs if line["log_level"] == "warning"] == (
        [] if asks else ["restore.nobody_asked"]
    )


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
        found = await one.fetches.restorable(0.0)
        assert found.committed is None
        found = await one.fetches.restorable(0.1)
    assert found.committed is None
    assert "fails because a test wants it to" in found.storage_error


async def test_an_unknown_save_or_file_is_the_callers_mistake(store: FakeStore, volume: Path) -> None:
    info = await store_checkpoint(store, 100)
    async with pod(store, volume) as one:
        with pytest.raises(RequestError) as caught:
            await one.fetches.fetch("nobody-1", [], whole=True, wait_seconds=WAIT_SECONDS)
        assert caught.value.kind is ErrorKind.UNKNOWN_SAVE
        with pytest.raises(RequestError) as caught:
            await one.fetch(info, FileRange(path="../../etc/passwd"))
        assert caught.value.kind is ErrorKind.FILE_MISSING
        assert on_disk((await one.fetch(info)).path) == all_files(100)


async def test_another_checkpoint_replaces_the_one_being_fetched(store: FakeStore, volume: Path) -> None:
    first, second = await store_checkpoint(store, 100), await store_checkpoint(store, 200)
    async with pod(store, volume) as one:
        await one.fetch(second, FileRange(path="rng_state_0.pth"))
        done = await one.fetch(first, FileRange(path="rng_state_0.pth"))
        assert [found.name for found in (volume / ".mooring" / "incoming").iterdir()] == [first.save]
        assert on_disk(done.path)["rng_state_0.pth"] == rank_files(100)["rng_state_0.pth"]


def committed(save: str) -> Committed:
    return Committed(at=0.0, work=cast(Any, SimpleNamespace(save=save)))


@pytest.mark.parametrize("step", [1, 200], ids=["of a run that began anew", "of the next steps"])
async def test_what_was_fetched_goes_when_the_trainer_has_saved(step: int, store: FakeStore, volume: Path) -> None:
    info = await store_checkpoint(store, 100)
    newer = replace(info, save="new-1", name=f"checkpoint-{step}", step=step)
    incoming = volume / ".mooring" / "incoming"
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
    incoming = volume / ".mooring" / "incoming"
    async with pod(store, volume) as one:
        await one.fetch(info, FileRange(path="rng_state_0.pth"))
        store.fail("get_into", ErrorKind.CHECKPOINT_CORRUPT, times=100)
        with pytest.raises(StoreError):
            await one.fetch(info)
        one.fetches.hear(cast(Any, None), announced(newer))
        one.fetches.hear(cast(Any, None), committed("new-1"))
        await until(lambda: not list(incoming.iterdir()))


async def test_a_piece_that_is_on_its_way_is_not_fetched_again(store: FakeStore, volume: Path) -> None:
    """The guess fetches it already when a client asks: it must not be written to once it was verified."""
    info = await store_checkpoint(store, 100)
    begun, may_go_on = asyncio.Event(), asyncio.Event()
    get_into = store.get_into

    async def slow(*arguments: Any, **named: Any) -> int:
        begun.set()
        await may_go_on.wait()
        return await get_into(*arguments, **named)

    store.get_into = slow  # type: ignore[method-assign]
    async with pod(store, volume, mode="lazy") as one:
        await begun.wait()
        asking = asyncio.create_task(one.fetch(info))
        await until(lambda: one.fetches.progress() is not None)
        may_go_on.set()
        assert on_disk((await asking).path) == all_files(100)
    assert sorted(fetched(store)) == sorted([*["model-0.safetensors"] * 6, "state-0.pt", "rng_state_0.pth"])


async def test_an_agent_that_was_started_again_waits_for_the_store_too(store: FakeStore, volume: Path) -> None:
    info = await store_checkpoint(store, 100)
    async with pod(store, volume) as one:
        store.fail("list", ErrorKind.UNREACHABLE, times=2)
        assert on_disk((await one.fetch(info)).path) == all_files(100)


async def test_a_guess_that_has_no_room_is_not_made(
    store: FakeStore, volume: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(name: str, *_: Any) -> None:
        raise VolumeError(ErrorKind.DISK_FULL, f"{name} does not fit", hint="make room")

    monkeypatch.setattr(partial_copy, "check_room", no_room)
    info = await store_checkpoint(store, 100)
    with capture_logs() as logs:
        async with pod(store, volume, mode="lazy") as one:
            await until(lambda: any(line["event"] == "fetch.not_guessed" for line in logs))
            for ranges in ([], [FileRange(path="rng_state_0.pth")]):
                with pytest.raises(VolumeError):
                    await one.fetch(info, *ranges)
    assert fetched(store) == []


async def test_what_was_only_guessed_is_not_what_the_run_resumed_from(store: FakeStore, volume: Path) -> None:
    await store_checkpoint(store, 100)
    async with pod(store, volume, mode="lazy"):
        await until(lambda: len(fetched(store)) == 8)
    assert recorded_save(volume / "state", RESUMED) == ""


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


async def test_requests_for_the_same_bytes_are_fetched_once(store: FakeStore, volume: Path) -> None:
    info = await store_checkpoint(store, 100)
    async with pod(store, volume) as one:
        store.calls.clear()
        answers = await asyncio.gather(*(one.fetch(info, FileRange(path="model-0.safetensors")) for _ in range(8)))
    assert {answer.path for answer in answers} == {volume / ".mooring" / "incoming" / info.save}
    assert len(fetched(store)) == 6

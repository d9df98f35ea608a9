"""What an agent fetches before anybody asks for it."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from structlog.testing import capture_logs
from tests.fakes.fake_store import FakeStore
from tests.restore.fetching_pod import announced, fetched, on_disk, pod, until
from tests.restore.stored_checkpoints import all_files, store_checkpoint

from keepstep_agent.adapters.records import recorded_save
from keepstep_agent.core.errors import ErrorKind, VolumeError
from keepstep_agent.restore import partial_copy
from keepstep_agent.restore.partial_copy import FileRange
from keepstep_api.names import RESUMED


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


async def test_a_guess_is_noted_while_it_is_made(store: FakeStore, volume: Path) -> None:
    """Nobody asks for it, so one that kills the agent must be known to the next."""
    noted: list[str] = []

    @contextmanager
    def guessing() -> Iterator[None]:
        noted.append("begins")
        yield
        noted.append(f"ends after {len(fetched(store))} reads")

    await store_checkpoint(store, 100)
    async with pod(store, volume, mode="lazy", guessing=guessing):
        await until(lambda: len(noted) == 2)
    assert noted == ["begins", f"ends after {len(fetched(store))} reads"]
    assert set(fetched(store)) == {"model-0.safetensors", "state-0.pt", "rng_state_0.pth"}


async def test_a_guess_that_killed_two_agents_is_not_made(store: FakeStore, volume: Path) -> None:
    info = await store_checkpoint(store, 100)
    async with pod(store, volume, mode="lazy", guessing=None) as one:
        await one.offered()
        assert fetched(store) == []
        assert on_disk((await one.fetch(info)).path) == all_files(100)


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

"""Recovery of unannounced checkpoints asks the store first, because a save may be committed despite its record."""

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from structlog.testing import capture_logs
from tests.adapters.test_unannounced import keep
from tests.core.play import Play, settings
from tests.fakes.fake_ready_store import FakeReadyStore
from tests.fakes.fake_store import FakeStore
from tests.harness.bounds import HANG_SECONDS
from tests.restore.stored_checkpoints import store_checkpoint

from keepstep_agent.adapters.volume.content_check import content_signature
from keepstep_agent.core.errors import ErrorKind, RequestError
from keepstep_agent.core.stored.object_layout import marker_key
from keepstep_agent.runtime.monitors.unannounced import UnannouncedRecovery
from keepstep_agent.runtime.work.announcements import Announcement
from keepstep_api.names import CHECKPOINT_DIRECTORY


class _Announced:
    """Takes announcements and enters nothing."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.signatures: list[str] = []
        self.recorded_at: list[float | None] = []
        self.files: list[tuple[int, tuple[str, ...], tuple[str, ...]]] = []

    async def enter(self, announcement: Announcement) -> None:
        self.steps.append(announcement.step)
        self.signatures.append(announcement.signature)
        self.recorded_at.append(announcement.recorded_at)
        self.files.append((announcement.rank, announcement.files, announcement.others))


class _Engine:
    def __init__(self) -> None:
        self.play = Play()
        self.state = self.play.state

    def doing(self, work: str, title: str) -> AbstractContextManager[None]:
        return nullcontext()


async def _rescued(volume: Path, store: FakeStore, *, looks: int = 1) -> Sequence[int]:
    """The steps that are announced."""
    return (await _announced(volume, store, looks=looks)).steps


async def _announced(volume: Path, store: FakeStore, *, looks: int = 1) -> _Announced:
    announced = _Announced()
    with _unannounced(volume, announced, FakeReadyStore(store), _Engine()) as unannounced:
        async with asyncio.timeout(HANG_SECONDS):
            for _ in range(looks):
                await unannounced.look()
    return announced


@contextmanager
def _unannounced(
    volume: Path, announced: _Announced, opened: FakeReadyStore, engine: _Engine
) -> Iterator[UnannouncedRecovery]:
    with ThreadPoolExecutor(1) as executor:
        yield UnannouncedRecovery(
            announcements=cast(Any, announced),
            engine=cast(Any, engine),
            settings=_settings(volume),
            executor=executor,
            store=cast(Any, opened),
        )


async def _hours_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every time-out that runs now is over."""
    loop = asyncio.get_running_loop()
    time = loop.time
    monkeypatch.setattr(loop, "time", lambda: time() + 10_000.0)
    for _ in range(5):
        await asyncio.sleep(0)


def _settings(volume: Path) -> Any:
    return replace(settings(), volume=str(volume), checkpoint_directory=str(volume / CHECKPOINT_DIRECTORY))


async def test_what_the_store_has_whole_is_not_announced_again_nor_what_is_older(tmp_path: Path) -> None:
    store = FakeStore()
    for step in (100, 200, 300):
        keep(tmp_path, step, saved_at=float(step))
    await store_checkpoint(store, 200, save="a-200", name="checkpoint-200", saved_at=200.5)
    assert await _rescued(tmp_path, store) == [300]


async def test_with_all_committed_the_store_is_asked_once(tmp_path: Path) -> None:
    store = FakeStore()
    keep(tmp_path, 100, saved_at=100.0)
    await store_checkpoint(store, 100, save="a-100", name="checkpoint-100", saved_at=100.5)
    store.calls.clear()
    assert await _rescued(tmp_path, store, looks=3) == []
    assert [name for name, _ in store.calls] == ["list", "get", "get"]


async def test_the_id_of_an_earlier_save_is_no_proof(tmp_path: Path) -> None:
    """It is announced, and refused before its first byte goes out: the keys are another's."""
    store = FakeStore()
    keep(tmp_path, 100, saved_at=5000.0)
    await store_checkpoint(store, 100, save="a-100", name="checkpoint-100", saved_at=100.5)
    assert await _rescued(tmp_path, store) == [100]


async def test_a_marker_that_was_cut_short_is_no_proof(tmp_path: Path) -> None:
    store = FakeStore()
    keep(tmp_path, 100, saved_at=100.0)
    info = await store_checkpoint(store, 100, save="a-100", name="checkpoint-100", saved_at=100.5)
    await store.put(marker_key(info), store.objects[marker_key(info)].body[:100])
    assert await _rescued(tmp_path, store) == [100]


@pytest.mark.parametrize("kind", [ErrorKind.UNREACHABLE, ErrorKind.ACCESS_DENIED])
async def test_a_store_that_does_not_say_keeps_nothing_from_being_announced(tmp_path: Path, kind: ErrorKind) -> None:
    store = FakeStore()
    keep(tmp_path, 100, saved_at=100.0)
    store.fail("get", kind)
    announced = await _announced(tmp_path, store)
    assert announced.steps == [100]
    # By this, its commit is found when the store can be asked.
    assert announced.recorded_at == [100.0]


async def test_what_is_announced_is_what_the_record_is_about_whatever_has_its_name_by_then(tmp_path: Path) -> None:
    """The store takes its time to say what it has, and the next attempt saves that step again meanwhile."""
    keep(tmp_path, 100, saved_at=100.0)
    checkpoint = tmp_path / CHECKPOINT_DIRECTORY / "checkpoint-100"
    recorded = content_signature(tmp_path, str(checkpoint), ("state",))

    class _Slow(FakeStore):
        def list(self, *arguments: Any, **named: Any) -> Any:
            if not checkpoint.with_name("old").exists():
                checkpoint.rename(checkpoint.with_name("old"))
                keep(tmp_path, 100, saved_at=200.0)
            return super().list(*arguments, **named)

    announced = await _announced(tmp_path, _Slow())
    assert announced.steps == [100]
    assert announced.signatures == [recorded] != [content_signature(tmp_path, str(checkpoint), ("state",))]


async def test_every_rank_of_the_record_announces_its_files_and_what_the_program_put_beside_them(
    tmp_path: Path,
) -> None:
    keep(tmp_path, 100, saved_at=100.0, ranks=(0, 1), others=("train.log",))
    announced = await _announced(tmp_path, FakeStore())
    assert announced.files == [(rank, ("state",), ("train.log",)) for rank in (0, 1)]


async def test_a_store_that_is_still_being_opened_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FakeStore()
    keep(tmp_path, 100, saved_at=100.0)
    await store_checkpoint(store, 100, save="a-100", name="checkpoint-100", saved_at=100.5)
    announced, opened = _Announced(), FakeReadyStore(store)
    opened.opened.clear()
    with _unannounced(tmp_path, announced, opened, _Engine()) as unannounced:
        looking = asyncio.create_task(unannounced.look())
        await opened.asked.wait()
        await _hours_pass(monkeypatch)
        opened.opened.set()
        await looking
    assert announced.steps == []


async def test_where_time_is_short_what_the_store_does_not_say_is_announced(tmp_path: Path) -> None:
    keep(tmp_path, 100, saved_at=100.0)
    announced, opened = _Announced(), FakeReadyStore(FakeStore())
    opened.opened.clear()
    with _unannounced(tmp_path, announced, opened, _Engine()) as unannounced:
        async with asyncio.timeout(HANG_SECONDS):
            await unannounced.look(asking_seconds=0.0)
    assert announced.steps == [100]


async def test_what_is_announced_while_the_store_is_asked_supersedes_what_is_older(tmp_path: Path) -> None:
    """What is announced last counts as the newest."""
    for step in (100, 200):
        keep(tmp_path, step, saved_at=float(step))
    announced, opened, engine = _Announced(), FakeReadyStore(FakeStore()), _Engine()
    opened.opened.clear()
    with _unannounced(tmp_path, announced, opened, engine) as unannounced:
        async with asyncio.timeout(HANG_SECONDS), asyncio.TaskGroup() as tasks:
            tasks.create_task(unannounced.look())
            await opened.asked.wait()
            engine.play.announce("a-200")
            opened.opened.set()
    assert announced.steps == []


@pytest.mark.parametrize("error", [RequestError(ErrorKind.BAD_NAME, "no", hint="another"), RuntimeError("a bug")])
async def test_a_record_that_cannot_be_announced_is_one_line_and_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    keep(tmp_path, 100, saved_at=100.0, ranks=(0, 1, 2))
    keep(tmp_path, 200, saved_at=200.0)
    enter = _Announced.enter

    async def enter_some(self: _Announced, announcement: Announcement) -> None:
        if announcement.step == 100:
            raise error
        await enter(self, announcement)

    monkeypatch.setattr(_Announced, "enter", enter_some)
    with capture_logs() as log:
        assert await _rescued(tmp_path, FakeStore()) == [200]
    assert len([line for line in log if line["log_level"] == "error"]) == 1

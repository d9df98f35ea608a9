"""The pod ends while the store or the volume hangs: the notice goes out first, and the agent asks to leave in time."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.adapters.test_unannounced import keep
from tests.core.play import Play, settings
from tests.harness.bounds import HANG_SECONDS

from keepstep_agent.core.agent.events import Event, RanksSeen, StopRequested, TerminationNoticed
from keepstep_agent.core.settings.values import Settings, TerminationSettings
from keepstep_agent.runtime.api.server import AgentService
from keepstep_agent.runtime.monitors import monitors
from keepstep_agent.runtime.monitors.mirror import Mirror
from keepstep_agent.runtime.monitors.monitors import Monitors
from keepstep_agent.runtime.monitors.ranks import RanksLook
from keepstep_agent.runtime.monitors.unannounced import UnannouncedRecovery
from keepstep_agent.runtime.work.announcements import Announcement
from keepstep_api.names import CHECKPOINT_DIRECTORY
from keepstep_api.v1 import agent_pb2


class _SilentStore:
    """Is never opened."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()

    async def get(self) -> object:
        self.asked.set()
        return await asyncio.Event().wait()


class _Engine:
    """The core, and in `news` what it and the announcements were told, in order."""

    def __init__(self, play: Play) -> None:
        self.state = play.state
        self.news: list[str] = []
        self.told = asyncio.Event()
        self._play = play

    def doing(self, work: str, title: str) -> AbstractContextManager[None]:
        return nullcontext()

    async def submit(self, event: Event) -> None:
        self._play.feed(event)
        self.news.append(type(event).__name__)
        self.told.set()


class _Announcements:
    """`hangs`: the volume takes nothing any more."""

    def __init__(self, engine: _Engine) -> None:
        self._engine = engine
        self.hangs = False

    async def enter(self, announcement: Announcement) -> None:
        if self.hangs:
            await asyncio.Event().wait()
        self._engine.news.append(f"step {announcement.step}")


class _Agent:
    """Its monitors, with a checkpoint that was recorded and never announced, whose only rank has just died."""

    def __init__(
        self,
        volume: Path,
        executor: ThreadPoolExecutor,
        *,
        grace_seconds: float = 600.0,
        empty_directories: bool = False,
    ) -> None:
        keep(volume, 100, saved_at=100.0)
        play = Play()
        play.feed(RanksSeen(at=play.now, alive=frozenset({0})))
        own: Settings = replace(
            settings(),
            volume=str(volume),
            checkpoint_directory=str(volume / CHECKPOINT_DIRECTORY),
            termination=TerminationSettings(grace_seconds=grace_seconds),
        )
        self.engine, self.store = _Engine(play), _SilentStore()
        self.announcements = _Announcements(self.engine)
        self.mirror = _EmptyDirectories(self.engine.news) if empty_directories else None
        clock = cast(Any, SimpleNamespace(now=lambda: play.now))
        nobody = RanksLook(alive=frozenset(), newest=None, age_seconds=0.0)
        live_ranks = cast(Any, SimpleNamespace(look=lambda: nobody, last_steps=lambda ended, since: ()))
        self.monitors = Monitors(
            engine=cast(Any, self.engine),
            clock=clock,
            live_ranks=live_ranks,
            executor=executor,
            settings=own,
            mirror=cast(Mirror | None, self.mirror),
            unannounced=UnannouncedRecovery(
                announcements=cast(Any, self.announcements),
                engine=cast(Any, self.engine),
                settings=own,
                executor=executor,
                store=cast(Any, self.store),
            ),
        )
        self.service = AgentService(
            engine=cast(Any, self.engine),
            clock=clock,
            announcements=cast(Any, self.announcements),
            fetches=cast(Any, SimpleNamespace(progress=lambda: None)),
            live_ranks=live_ranks,
            monitors=self.monitors,
        )


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as executor:
        yield executor


NOTICE, RANKS, STOP = (cls.__name__ for cls in (TerminationNoticed, RanksSeen, StopRequested))


async def test_a_sigterm_is_a_notice_before_the_store_is_asked(
    tmp_path: Path, executor: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitors, "_ASKING_SECONDS", 0.0)
    agent = _Agent(tmp_path, executor)
    async with asyncio.timeout(HANG_SECONDS):
        await agent.monitors.stop("SIGTERM")
    assert agent.engine.news == [NOTICE, RANKS, "step 100", STOP]


class _EmptyDirectories:
    """A mirror that has found nothing. `asked_after`: the news when it was asked."""

    def __init__(self, news: list[str]) -> None:
        self._news = news
        self.asked_after: list[str] = []

    async def last_looks(self, **_: object) -> None:
        pass

    async def nothing_found(self) -> str:
        self.asked_after = list(self._news)
        return "nothing was stored"


async def test_nothing_is_found_only_if_no_record_is_left_to_announce(
    tmp_path: Path, executor: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent before this one has died, and this one has announced nothing yet when the program ends."""
    monkeypatch.setattr(monitors, "_ASKING_SECONDS", 0.0)
    agent = _Agent(tmp_path, executor, empty_directories=True)
    assert agent.mirror is not None
    async with asyncio.timeout(HANG_SECONDS):
        await agent.monitors.drain_after_program(failed_at=None)
    assert agent.mirror.asked_after == [RANKS, "step 100"]


async def test_a_record_of_what_an_earlier_agent_had_shows_that_something_is_stored(
    tmp_path: Path, executor: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its journal is lost."""
    monkeypatch.setattr(monitors, "_ASKING_SECONDS", 0.0)
    agent = _Agent(tmp_path, executor, empty_directories=True)
    keep(tmp_path, 200, saved_at=200.0, announced=True)
    async with asyncio.timeout(HANG_SECONDS):
        await agent.monitors.drain_after_program(failed_at=None)
    assert agent.engine.news == [RANKS, STOP]
    assert agent.engine.state.termination.nothing_found == ""


async def test_a_notice_does_not_wait_for_a_store_that_is_silent(tmp_path: Path, executor: ThreadPoolExecutor) -> None:
    agent = _Agent(tmp_path, executor)
    request = agent_pb2.NotifyTerminationRequest(source="preStop", grace_seconds=30.0)
    async with asyncio.timeout(HANG_SECONDS):
        await agent.service.NotifyTermination(request, None)
    assert agent.engine.news == [NOTICE, RANKS]


async def test_a_volume_that_hangs_does_not_keep_the_agent_past_its_deadline(
    tmp_path: Path, executor: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitors, "_ASKING_SECONDS", 0.0)
    agent = _Agent(tmp_path, executor, grace_seconds=0.1)
    agent.announcements.hangs = True
    async with asyncio.timeout(HANG_SECONDS):
        await agent.monitors.stop("SIGTERM")
    assert agent.engine.news == [NOTICE, RANKS, STOP]


async def test_ranks_are_watched_while_the_store_is_being_opened(tmp_path: Path, executor: ThreadPoolExecutor) -> None:
    agent = _Agent(tmp_path, executor)
    looking = asyncio.create_task(agent.monitors.watch_unannounced())
    watching = asyncio.create_task(agent.monitors.watch_ranks(None))
    try:
        async with asyncio.timeout(HANG_SECONDS):
            await agent.store.asked.wait()
            await agent.engine.told.wait()
    finally:
        looking.cancel()
        watching.cancel()
        await asyncio.wait({looking, watching})
    assert agent.engine.news == [RANKS]

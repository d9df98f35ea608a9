"""The preemption watcher passes each notice on once and in time. A service that fails or is absent does no harm."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from structlog.testing import capture_logs
from tests.fakes.fake_preemption_source import FakePreemptionSource
from tests.runtime.patience import until

from keepstep_agent.core.settings.values import TerminationSettings
from keepstep_agent.ports import TerminationNotice
from keepstep_agent.runtime.monitors.preemption import PreemptionWatcher, preemption_watcher

SOON = TerminationNotice(key="spot", left_seconds=120.0, source="fake spot")


class Listener:
    """What the watch hears, and what it passes on."""

    def __init__(self, *clouds: FakePreemptionSource) -> None:
        self.clouds = list(clouds)
        self.noticed: list[tuple[str, float]] = []
        self.searches = 0

    async def notify(self, source: str, seconds: float) -> None:
        self.noticed.append((source, seconds))

    def candidates(self) -> list[FakePreemptionSource]:
        self.searches += 1
        return self.clouds

    @asynccontextmanager
    async def listening(self, *, named: bool = True) -> AsyncIterator[None]:
        watch = PreemptionWatcher(
            candidates=self.candidates,
            named=named,
            notify=self.notify,
            search_pauses_seconds=(0.0, 0.0, 0.0),
        )
        task = asyncio.create_task(watch.watch())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait({task})

    async def look_again(self) -> None:
        seen = self.clouds[0].looks
        await until(lambda: self.clouds[0].looks >= seen + 2)


@pytest.fixture
async def cloud() -> FakePreemptionSource:
    return FakePreemptionSource(pause_seconds=0.001)


async def test_a_notice_is_passed_on_once_with_the_time_that_is_left(cloud: FakePreemptionSource) -> None:
    listener = Listener(cloud)
    async with listener.listening():
        cloud.standing.append(SOON)
        await until(lambda: bool(listener.noticed))
        await listener.look_again()
    assert listener.noticed == [("fake spot", 120.0)]
    assert cloud.closed


async def test_what_is_far_ahead_is_held_back_until_it_is_near(cloud: FakePreemptionSource) -> None:
    listener = Listener(cloud)
    cloud.standing.append(replace(SOON, left_seconds=3600.0))
    async with listener.listening():
        await listener.look_again()
        assert listener.noticed == []
        cloud.standing[:] = [replace(SOON, left_seconds=100.0)]
        await until(lambda: bool(listener.noticed))
    assert listener.noticed == [("fake spot", 100.0)]


async def test_what_is_far_ahead_and_taken_back_was_never_a_notice(cloud: FakePreemptionSource) -> None:
    listener = Listener(cloud)
    cloud.standing.append(replace(SOON, left_seconds=3600.0))
    async with listener.listening():
        await listener.look_again()
        cloud.standing.clear()
        await listener.look_again()
    assert listener.noticed == []


async def test_what_should_have_ended_already_leaves_a_moment_for_a_save(cloud: FakePreemptionSource) -> None:
    listener = Listener(cloud)
    cloud.standing.append(replace(SOON, left_seconds=-10.0))
    async with listener.listening():
        await until(lambda: bool(listener.noticed))
    assert listener.noticed[0][1] > 2


async def test_a_service_that_fails_is_said_once_and_heard_again(cloud: FakePreemptionSource) -> None:
    listener = Listener(cloud)
    cloud.silent = True
    with capture_logs() as logs:
        async with listener.listening():
            await listener.look_again()
            await listener.look_again()
            cloud.silent = False
            cloud.standing.append(SOON)
            await until(lambda: bool(listener.noticed))
    events = [line["event"] for line in logs]
    assert events.count("preemption.source_failed") == 1
    assert events.count("preemption.source_recovered") == 1


async def test_auto_listens_to_whoever_answers_and_closes_the_others(cloud: FakePreemptionSource) -> None:
    other = FakePreemptionSource()
    other.silent = True
    listener = Listener(cloud, other)
    cloud.standing.append(SOON)
    async with listener.listening(named=False):
        await until(lambda: bool(listener.noticed))
        assert other.closed
        assert not cloud.closed


async def test_where_no_cloud_answers_it_is_looked_for_a_few_times_and_quietly(cloud: FakePreemptionSource) -> None:
    cloud.silent = True
    listener = Listener(cloud)
    with capture_logs() as logs:
        async with listener.listening(named=False):
            await until(lambda: bool(logs))
    assert listener.searches == 3
    assert [(line["event"], line["log_level"]) for line in logs] == [("preemption.no_cloud", "info")]


@pytest.mark.parametrize(
    ("wanted", "listens"), [("off", False), ("auto", True), ("aws", True), ("gcp", True), ("azure", True)]
)
def test_nobody_listens_who_was_not_asked_to(wanted: str, listens: bool) -> None:
    listener = Listener()
    watch = preemption_watcher(TerminationSettings(preemption_source=wanted), notify=listener.notify)
    assert (watch is not None) == listens

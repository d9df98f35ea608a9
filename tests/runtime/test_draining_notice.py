"""The agent's notice in the bucket that its pod ends: there while something may come, and in nobody's way."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, cast

import pytest
from structlog.testing import capture_logs
from tests.core.play import Play, settings
from tests.fakes.fake_ready_store import FakeReadyStore, StoreClock
from tests.fakes.fake_store import FakeStore
from tests.runtime.patience import until

from keepstep_agent.core.agent.events import Event, StopRequested, TerminationNoticed, Ticked
from keepstep_agent.core.errors import ErrorKind
from keepstep_agent.core.settings.values import ClusterSettings
from keepstep_agent.core.stored.draining import Draining, decode_draining
from keepstep_agent.core.stored.object_layout import draining_key
from keepstep_agent.runtime.monitors import draining
from keepstep_agent.runtime.monitors.draining import DrainingNotice

KEY = draining_key("pod")


class Agent:
    """`store` is where it writes; its clock is the play's."""

    def __init__(self, store: FakeStore | None = None) -> None:
        self.play = Play()
        self.store = store or FakeStore()
        self.store.now = self.play.now
        self.ready = FakeReadyStore(self.store)
        self.notice = DrainingNotice(
            store=cast(Any, self.ready),
            clock=cast(Any, StoreClock(self.store)),
            settings=replace(settings(), cluster=ClusterSettings(pod_name="trainer-0")),
            pod="pod",
        )

    def hears(self, event: Event) -> None:
        self.play.feed(event)
        self.notice.hear(self.play.state, event)

    def ends_in(self, seconds: float) -> None:
        at = self.play.now
        self.hears(TerminationNoticed(at=at, deadline=at + seconds, source="preStop"))

    def stored(self) -> Draining | None:
        found = self.store.objects.get(KEY)
        return decode_draining(found.body, KEY) if found else None

    def puts(self) -> int:
        return self.store.calls.count(("put", KEY))

    @asynccontextmanager
    async def keeping(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.notice.keep())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait({task})


async def test_it_is_there_from_the_notice_until_the_exit() -> None:
    agent = Agent()
    async with agent.keeping():
        agent.hears(Ticked(at=agent.play.now))
        agent.ends_in(90.0)
        await until(lambda: agent.stored() is not None)
        assert agent.stored() == Draining(holder="trainer-0", seconds_left=90.0)
        # What changes nothing is not written again: a later notice, and the agent's own SIGTERM.
        agent.ends_in(90.0)
        agent.hears(StopRequested(at=agent.play.now, trainers_gone=False, nothing_found=""))
        await asyncio.sleep(0.01)
        assert agent.puts() == 1
        # A cloud's notice of two minutes, and a pod that is deleted meanwhile.
        agent.ends_in(30.0)
        await until(lambda: agent.puts() == 2)
        assert agent.stored() == Draining(holder="trainer-0", seconds_left=30.0)
    await agent.notice.last_words()
    assert agent.stored() is None


async def test_it_is_renewed_until_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draining, "_RENEWAL_SECONDS", 0.005)
    agent = Agent()
    async with agent.keeping():
        agent.ends_in(30.0)
        await until(lambda: agent.puts() > 2)
        agent.store.now += 10.0
        await until(lambda: agent.stored() == Draining(holder="trainer-0", seconds_left=20.0))
        agent.store.now += 20.0
        # One may be on its way; none follows.
        await asyncio.sleep(0.05)
        puts = agent.puts()
        await asyncio.sleep(0.05)
        assert agent.puts() == puts


async def test_a_notice_that_turns_out_void_is_taken_back() -> None:
    agent = Agent()
    async with agent.keeping():
        agent.ends_in(30.0)
        await until(lambda: agent.stored() is not None)
        agent.hears(Ticked(at=agent.play.now + 30.0 + 61.0))
        await until(lambda: agent.stored() is None)
    deletions = agent.store.calls.count(("delete", KEY))
    await agent.notice.last_words()
    assert agent.store.calls.count(("delete", KEY)) == deletions == 1


async def test_a_store_that_fails_is_tried_again_and_one_that_refuses_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draining, "_RETRY_SECONDS", 0.0)
    agent = Agent()
    agent.store.fail("put", ErrorKind.UNREACHABLE)
    async with agent.keeping():
        agent.ends_in(30.0)
        await until(lambda: agent.stored() is not None)
    refused = Agent()
    refused.store.fail("put", ErrorKind.ACCESS_DENIED)
    with capture_logs() as logs:
        async with refused.keeping():
            refused.ends_in(30.0)
            await until(lambda: any(line["event"] == "draining.not_written" for line in logs))
            await asyncio.sleep(0.01)
    assert (refused.puts(), refused.stored()) == (1, None)


async def test_a_store_that_is_not_there_holds_up_no_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draining, "_LAST_WORDS_SECONDS", 0.05)
    agent = Agent()
    agent.ready.opened.clear()
    async with agent.keeping():
        agent.ends_in(30.0)
        await agent.ready.asked.wait()
    with capture_logs() as logs:
        await agent.notice.last_words()
    assert [line["event"] for line in logs] == ["draining.left"]
    assert agent.store.calls == []


async def test_an_agent_that_no_notice_reached_asks_the_store_nothing_when_it_exits() -> None:
    agent = Agent()
    agent.ready.opened.clear()
    async with agent.keeping():
        pass
    await agent.notice.last_words()
    assert not agent.ready.asked.is_set()


class _SlowStore(FakeStore):
    """Answers a write when it may."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.may_answer = asyncio.Event(), asyncio.Event()

    async def put(self, key: str, body: bytes, *, if_absent: bool = False) -> None:
        self.asked.set()
        await self.may_answer.wait()
        await super().put(key, body, if_absent=if_absent)


async def test_what_is_being_written_at_the_exit_does_not_stay_behind() -> None:
    store = _SlowStore()
    agent = Agent(store)
    async with agent.keeping():
        agent.ends_in(30.0)
        await store.asked.wait()
    leaving = asyncio.create_task(agent.notice.last_words())
    await asyncio.sleep(0)
    store.may_answer.set()
    await leaving
    assert store.calls == [("put", KEY), ("delete", KEY)]
    assert agent.stored() is None


async def test_a_write_that_hangs_is_given_up_at_the_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draining, "_LAST_WORDS_SECONDS", 0.05)
    store = _SlowStore()
    agent = Agent(store)
    async with agent.keeping():
        agent.ends_in(30.0)
        await store.asked.wait()
    with capture_logs() as logs:
        await agent.notice.last_words()
    assert [line["event"] for line in logs] == ["draining.left"]

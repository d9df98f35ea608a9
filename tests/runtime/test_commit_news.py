"""How receivers of events are told: until they have taken each event, in order, and without a word of their secrets."""

import asyncio
import json
import os
import shlex
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import cast

from structlog.testing import capture_logs
from tests.core.play import settings
from tests.harness.bounds import HANG_SECONDS
from tests.runtime.patience import until
from tests.servers.scripted import Asked, ScriptedServer, response

from keepstep_agent.core.agent.events import Event, NewsDue
from keepstep_agent.core.agent.reducer import advance
from keepstep_agent.core.agent.state import State
from keepstep_agent.core.model import CommitNews, Kind, Receiver, SaveInfo
from keepstep_agent.core.policies.commit_news import receivers_of
from keepstep_agent.core.settings.values import EventSettings
from keepstep_agent.runtime.engine.engine import Engine
from keepstep_agent.runtime.outside.commit_news import CommitEvents
from keepstep_agent.runtime.outside.outbox import Outbox, Pace

SECRET = "s3cr3t"


class Owing:
    """As the engine, with commits that receivers have still to be told."""

    def __init__(self, events: EventSettings) -> None:
        self.state = State(settings=replace(settings(), events=events))
        self._changed = asyncio.Condition()

    def now(self) -> float:
        return 0.0

    async def until(self, holds: Callable[[State], bool]) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: holds(self.state))

    async def submit(self, event: Event) -> None:
        advance(self.state, event)
        async with self._changed:
            self._changed.notify_all()

    async def commits(self, save: str) -> None:
        info = SaveInfo(save=save, name=f"checkpoint-{save}", step=1, kind=Kind.PERIODIC, world_size=1)
        news = CommitNews(info=info, attempt="job-1", size_bytes=1, committed_at=0.0)
        receivers = (Receiver.URL, Receiver.COMMAND)
        await self.submit(NewsDue(at=0.0, news=news, receivers=receivers))

    def owes(self, receiver: Receiver) -> list[str]:
        return [news.info.save for news in self.state.untold_news.of(receiver)]


@asynccontextmanager
async def telling(owing: Owing) -> AsyncIterator[None]:
    pace = Pace(shortest_pause_seconds=0.001)
    senders = [CommitEvents(cast(Engine, owing), owing, one) for one in receivers_of(owing.state.settings.events)]
    tasks = [asyncio.create_task(Outbox(sender, pace).run()) for sender in senders]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


class Answers:
    """Answers with these statuses, then with the last of them."""

    def __init__(self, *statuses: int, location: str = "/") -> None:
        self._statuses = list(statuses)
        self._location = location

    async def __call__(self, asked: Asked, writer: asyncio.StreamWriter) -> None:
        status = self._statuses.pop(0) if len(self._statuses) > 1 else self._statuses[0]
        writer.write(response(status, location=self._location))


def ids(server: ScriptedServer) -> list[str]:
    return [json.loads(asked.body)["id"] for asked in server.asked]


async def test_an_event_is_posted_until_it_is_taken_and_the_next_one_after_it() -> None:
    async with ScriptedServer(Answers(500, 429, 204)) as server:
        owing = Owing(EventSettings(event_url=f"{server.url}/hook"))
        await owing.commits("a")
        await owing.commits("b")
        with capture_logs() as lines:
            async with telling(owing):
                await until(lambda: not owing.owes(Receiver.URL))
        assert ids(server) == ["a", "a", "a", "b"]
        first = server.asked[0]
        assert (first.method, first.target) == ("POST", "/hook")
        assert first.headers["content-type"] == "application/cloudevents+json; charset=utf-8"
    assert [line["event"] for line in lines] == ["outbox.not_taken", "outbox.taken_again"]


async def test_a_redirect_is_not_followed_and_said_once() -> None:
    async with (
        ScriptedServer(Answers(200)) as elsewhere,
        ScriptedServer(Answers(302, location=elsewhere.url)) as server,
    ):
        owing = Owing(EventSettings(event_url=server.url))
        await owing.commits("a")
        with capture_logs() as lines:
            async with telling(owing):
                await until(lambda: len(server.asked) > 2)
        assert elsewhere.connections == 0
    assert owing.owes(Receiver.URL) == ["a"]
    assert [line["event"] for line in lines] == ["outbox.not_taken"]
    assert "redirects are not followed" in lines[0]["error"]


async def test_a_receiver_that_hangs_is_asked_again_and_holds_up_no_other() -> None:
    async def hang(asked: Asked, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(HANG_SECONDS)

    async with ScriptedServer(hang) as server:
        events = EventSettings(event_url=server.url, event_command="true", event_timeout_seconds=5.0)
        owing = Owing(replace(events, event_timeout_seconds=2.0))
        await owing.commits("a")
        async with telling(owing):
            await until(lambda: not owing.owes(Receiver.COMMAND) and len(server.asked) > 1)
        assert owing.owes(Receiver.URL) == ["a"]


async def test_what_a_url_hides_is_in_no_log_line() -> None:
    urls = [
        f"http://user:{SECRET}@127.0.0.1:1/{SECRET}?token={SECRET}",
        f"http://no.such.host.invalid/{SECRET}",
        f"http://127.0.0.1:1/\u00e9{SECRET}",
    ]
    async with ScriptedServer(Answers(403)) as server:
        urls.append(server.url.replace("//", f"//user:{SECRET}@") + f"/{SECRET}")
        for url in urls:
            owing = Owing(EventSettings(event_url=url, event_timeout_seconds=5.0))
            await owing.commits("a")
            with capture_logs() as lines:
                async with telling(owing):
                    await until(lambda seen=lines: bool(seen))  # type: ignore[misc]
            assert SECRET not in str(lines)


def command(program: str, *arguments: object) -> str:
    return shlex.join([sys.executable, "-c", program, *map(str, arguments)])


async def test_a_command_gets_the_event_and_runs_again_until_it_succeeds(tmp_path: Path) -> None:
    program = (
        "import pathlib, sys; log = pathlib.Path(sys.argv[1]); text = sys.stdin.read();"
        "log.open('a').write(text + '\\n'); sys.exit(len(log.read_text().splitlines()) < 3)"
    )
    owing = Owing(EventSettings(event_command=command(program, tmp_path / "log"), event_timeout_seconds=HANG_SECONDS))
    await owing.commits("a")
    async with telling(owing):
        await until(lambda: not owing.owes(Receiver.COMMAND))
    events = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [event["id"] for event in events] == ["a", "a", "a"]


async def test_a_command_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    # The pipe ends when the last process that has it is gone.
    pipe = tmp_path / "alive"
    program = f"exec 9<>{shlex.quote(str(pipe))}; echo begun >&9; sleep 1000 & sleep 1000"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        owing = Owing(EventSettings(event_command=shlex.join(["sh", "-c", program]), event_timeout_seconds=1.0))
        await owing.commits("a")
        with capture_logs() as lines:
            async with telling(owing):
                await until(lambda: bool(lines))
        assert "was killed" in lines[0]["error"]

        def ended() -> bool:
            try:
                return os.read(reader, 100) == b""
            except BlockingIOError:
                return False

        await until(ended)
    finally:
        os.close(reader)


async def test_a_command_that_is_not_there_is_said() -> None:
    owing = Owing(EventSettings(event_command="no-such-program --flag"))
    await owing.commits("a")
    with capture_logs() as lines:
        async with telling(owing):
            await until(lambda: bool(lines))
    assert "'no-such-program' cannot be started" in lines[0]["error"]

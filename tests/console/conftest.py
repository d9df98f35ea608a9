"""A console in this process, on a store in memory, with real HTTP and a clock that tests set."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import pytest
from tests.console.stored_runs import Objects
from tests.fakes.fake_store import FakeStore
from tests.fakes.memory_store import StoredObject

from keepstep_agent.adapters.http_server import serving
from keepstep_agent.console.access import Access
from keepstep_agent.console.application import console_pages
from keepstep_agent.console.refresh import Runs
from keepstep_agent.console.settings import ConsoleSettings

NOW = 10_000.0


class ConsoleUnderTest:
    """`get` returns the status, the text and the headers. `now` is the clock."""

    def __init__(self, store: FakeStore, runs: Runs, session: aiohttp.ClientSession, port: int) -> None:
        self.store = store
        self.runs = runs
        self.port = port
        self._session = session

    def put(self, run: str, objects: Objects) -> None:
        for key, (body, at) in objects.items():
            self.store.objects[run + key] = StoredObject(body, at)

    async def get(self, address: str, **options: Any) -> tuple[int, str, Any]:
        return await self.ask("GET", address, **options)

    async def ask(self, method: str, address: str, **options: Any) -> tuple[int, str, Any]:
        url = f"http://127.0.0.1:{self.port}{address}"
        async with self._session.request(method, url, allow_redirects=False, **options) as answer:
            return answer.status, await answer.text(), answer.headers


Opener = Callable[..., Awaitable[ConsoleUnderTest]]


@pytest.fixture
async def console() -> AsyncIterator[Opener]:
    """Return a function that opens a console with the given settings."""
    async with AsyncExitStack() as stack:

        async def open_console(**settings: Any) -> ConsoleUnderTest:
            store = FakeStore()
            given = ConsoleSettings(destination="s3://bucket/runs", **settings)
            runs = Runs(store, given, clock=lambda: NOW)
            pages = console_pages(runs, given, Access(given, clock=lambda: NOW), clock=lambda: NOW)
            served = serving(pages, ("127.0.0.1", 0), option="--address", most=16, ask_seconds=60.0, finish_seconds=1.0)
            _, port = await stack.enter_async_context(served)
            session = await stack.enter_async_context(aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()))
            return ConsoleUnderTest(store, runs, session, port)

        yield open_console

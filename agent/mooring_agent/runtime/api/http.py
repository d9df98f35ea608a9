"""Serves /metrics for Prometheus, /healthz (the event loop runs) and /readyz (the API is served).

Uses h11, one page per connection: aiohttp takes ten megabytes, for which an agent without an upload has no other use.
Invariant: every connection ends, even if its client hangs.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import h11
import structlog

from mooring_agent.core.agent.state import State
from mooring_agent.core.errors import ErrorKind, MooringError
from mooring_agent.ports import Clock
from mooring_agent.runtime.engine.telemetry import StateCollector

_CONNECTION_SECONDS: Final = 5.0
_READ_BYTES: Final = 4096

log = structlog.get_logger("mooring.http")


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    status: int = 200
    content_type: str = "text/plain; charset=utf-8"
    body: bytes


Pages = Mapping[bytes, Callable[[], Page]]
"""By path."""


@asynccontextmanager
async def serve_http(address: str, state: Callable[[], State], clock: Clock) -> AsyncIterator[None]:
    """Serve while the context is open. `address` is host:port; if it is empty, nothing is served."""
    if not address:
        yield
        return
    pages = _pages(state, clock)
    host, _, port = address.rpartition(":")
    try:
        server = await asyncio.start_server(
            lambda reader, writer: _serve(pages, reader, writer), host.strip("[]") or None, int(port)
        )
    except (OSError, ValueError) as error:
        raise MooringError(
            ErrorKind.BAD_CONFIGURATION,
            f"cannot serve /metrics on {address!r}: {error}",
            hint="give --http-address as host:port with a free port, or leave it empty",
        ) from error
    log.info("http.serving", address=address)
    try:
        yield
    finally:
        # Without waiting for its connections: they end with the loop, and SIGKILL may be near.
        server.close()


def _pages(state: Callable[[], State], clock: Clock) -> Pages:
    def metrics() -> Page:
        # Imported here, so that an agent that nobody scrapes does not load it.
        from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

        registry = CollectorRegistry(auto_describe=False)
        registry.register(StateCollector(state, clock.now))
        return Page(body=generate_latest(registry), content_type=CONTENT_TYPE_LATEST)

    def fine() -> Page:
        return Page(body=b"ok\n")

    def ready() -> Page:
        return Page(status=503, body=b"exiting\n") if state().termination.exiting else fine()

    return {b"/metrics": metrics, b"/healthz": fine, b"/readyz": ready}


async def _serve(pages: Pages, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Serve one connection: read a request, answer it, close."""
    connection = h11.Connection(h11.SERVER)
    try:
        async with asyncio.timeout(_CONNECTION_SECONDS):
            try:
                request = await _request(connection, reader)
                page = _page(pages, request)
            except h11.RemoteProtocolError as error:
                page = Page(status=error.error_status_hint, body=b"no HTTP request\n")
            writer.write(_answer(connection, page))
            await writer.drain()
    except (TimeoutError, OSError):
        # The client is gone, or sent no request.
        pass
    finally:
        writer.close()


async def _request(connection: h11.Connection, reader: asyncio.StreamReader) -> h11.Request:
    """Read a request. Raises RemoteProtocolError if it is not HTTP, OSError if the connection ends too early."""
    while not isinstance(event := connection.next_event(), h11.Request):
        if event is not h11.NEED_DATA:
            raise ConnectionError("nothing was asked")
        connection.receive_data(await reader.read(_READ_BYTES))
    return event


def _page(pages: Pages, request: h11.Request) -> Page:
    if request.method != b"GET":
        # Without a body, because the answer to HEAD must have none.
        return Page(status=405, body=b"")
    page = pages.get(request.target.partition(b"?")[0])
    return Page(status=404, body=b"there are /metrics, /healthz and /readyz\n") if page is None else page()


def _answer(connection: h11.Connection, page: Page) -> bytes:
    headers = [("Content-Type", page.content_type), ("Content-Length", str(len(page.body))), ("Connection", "close")]
    head = connection.send(h11.Response(status_code=page.status, headers=headers))
    body = connection.send(h11.Data(data=page.body))
    assert head is not None
    assert body is not None
    return head + body

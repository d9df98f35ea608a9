"""An HTTP server that bounds the number of its connections and the time that each may take for a request.

A connection owes a request from its start, TLS handshake included, and after an answer from the next byte that it
sends; in between it is idle. It is closed if the request does not arrive within `ask_seconds`. When the port is full,
a new connection takes the place of the one that has waited longest, if that has waited longer than an honest request
takes; else the new one stays in the kernel's queue for a moment. So clients that hold connections open cost the memory
of at most `most` connections and keep nobody out. Time is counted in regular checks of all connections, so the time
that we spend on one request makes no other connection late. Without a connection there are no checks.

A connection has one request in memory, with a head of bounded size: bytes beyond it stay unread until it is answered.
aiohttp bounds each header and their number, but not their sum, and keeps 32 requests of a connection that sends ahead.
"""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import structlog
from aiohttp import web
from aiohttp.http import HttpProcessingError

from keepstep_agent.core.errors import ErrorKind, KeepstepError

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

_LOOK_SECONDS: Final = 0.5
_HONEST_LOOKS: Final = 2
"""An honest request has arrived before its connection is checked twice."""
_ROOM_SECONDS: Final = 0.05
_HEAD_END: Final = b"\r\n\r\n"
_MOST_HEAD_BYTES: Final = 32 * 1024
"""Of a request's line and headers. In memory they take five times as much if one character of each is a rare one."""
_TOO_LARGE_HEAD: Final = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\nConnection: close\r\nContent-Length: 0" + _HEAD_END
)
_RECEIVE_BUFFER_BYTES: Final = 256 * 1024
"""Of a connection, in the kernel, which counts it to our container. By default it grows to six megabytes."""

log = structlog.get_logger("keepstep.http")


def _is_bug(record: logging.LogRecord) -> bool:
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


_bugs: Final = logging.getLogger("keepstep.http")
_bugs.addFilter(_is_bug)  # what strangers send is answered with 400 and fills no log
_OPTIONS: Final[dict[str, Any]] = {
    "access_log": None,
    "logger": _bugs,
    # So that nothing grows after it was received.
    "auto_decompress": False,
    # What is read of a body before the application takes it.
    "read_bufsize": 64 * 1024,
    # Longer than the API server keeps an idle connection, so that it never writes into one that we are closing.
    "keepalive_timeout": 120.0,
    "lingering_time": 1.0,
}


def probe_pages(
    registry: Callable[[], "CollectorRegistry"], checks: Mapping[str, Callable[[], str]]
) -> web.Application:
    """Make the application that answers GET /healthz (the event loop runs), /metrics and `checks`, then hangs up.

    `checks`: path -> what returns the problem in a word, which is answered with 503; empty if there is none.
    """

    async def healthy(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def checked(request: web.Request) -> web.Response:
        problem = checks[request.path]()
        return web.Response(status=503 if problem else 200, text=f"{problem or 'ok'}\n")

    async def measured(_: web.Request) -> web.Response:
        # Imported here, so that a process that nobody scrapes does not load it.
        from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

        return web.Response(body=generate_latest(registry()), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def hang_up(_: web.Request, answer: web.StreamResponse) -> None:
        answer.headers["Connection"] = "close"
        answer.force_close()

    application = web.Application()
    for path, page in {"/healthz": healthy, "/metrics": measured, **dict.fromkeys(checks, checked)}.items():
        application.router.add_get(path, page, allow_head=False)
    application.on_response_prepare.append(hang_up)
    return application


def plain_answer(status: int, text: str, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(status=status, text=f"{text}\n", headers=headers)


@contextlib.asynccontextmanager
async def serving(
    application: web.Application,
    address: tuple[str, int],
    context: ssl.SSLContext | None = None,
    *,
    option: str,
    most: int,
    ask_seconds: float,
    finish_seconds: float,
) -> AsyncIterator[tuple[str, int]]:
    """Serve while the context is open; yields the address, for port 0 with the one that was free.

    On exit, requests that have begun are answered, within `finish_seconds`.

    `option` is the one that the address comes from. Raises KeepstepError if it cannot listen there.
    """
    listening = _listen(*address, option)
    runner = web.AppRunner(application, shutdown_timeout=finish_seconds)
    application.middlewares.insert(0, _begun)
    application.on_response_prepare.append(_answered)
    await runner.setup()
    assert runner.server is not None, "it is set up"
    connections = _Connections(runner.server, context, most, ask_seconds)
    tasks = [asyncio.create_task(one) for one in (connections.accept(listening), connections.look())]
    try:
        yield listening.getsockname()[:2]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        listening.close()
        await runner.cleanup()
        connections.close()


@web.middleware
async def _begun(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Tell the connection that a request's head was read."""
    assert isinstance(request.protocol, _Connection)
    if request.content_length is None and request.can_read_body:
        return plain_answer(411, "a request with a body needs a Content-Length")
    request.protocol.begun(request.content_length or 0)
    return await handler(request)


async def _answered(request: web.Request, _: web.StreamResponse) -> None:
    """Handle aiohttp's signal before each answer."""
    assert isinstance(request.protocol, _Connection)
    request.protocol.answered()


class _Connection(web.RequestHandler):
    """aiohttp's connection, with an account of what it owes, and of how much of it aiohttp may parse.

    `looks` counts the checks since the connection began to owe a request (`asks`) or became idle.
    """

    def __init__(self, server: web.Server, lost: Callable[["_Connection"], None]) -> None:
        super().__init__(server, loop=asyncio.get_running_loop(), **_OPTIONS)
        self.looks = 0
        self.asks = True
        self.connecting: asyncio.Task[None] | None = None
        self._lost = lost
        self._ahead = b""
        """What was received and is not parsed yet, because it belongs to the next request."""
        self._is_held = False
        self._in_head = True
        self._head_bytes = 0
        self._head_tail = b""
        """The last bytes of the head: its end may come in two pieces."""
        self._body_bytes_left = 0
        self._is_answered = False

    def begun(self, body_bytes: int) -> None:
        """The head was parsed, and a body of this size belongs to it."""
        self._in_head, self._is_answered, self._body_bytes_left = False, False, body_bytes
        self._parse()

    def answered(self) -> None:
        self.looks, self.asks, self._is_answered = 0, False, True
        self._parse()

    def busy(self) -> bool:
        """Whether a request is not answered yet, or the client does not take its answer."""
        return self.asks or (self.transport is not None and self.transport.get_write_buffer_size() > 0)

    def end(self) -> None:
        if self.transport is not None:
            self.transport.abort()
        elif self.connecting is not None:
            self.connecting.cancel()

    def data_received(self, data: bytes) -> None:
        if data:
            self._ahead += data
            self._parse()
        else:
            super().data_received(data)  # aiohttp goes on with what it has

    def _parse(self) -> None:
        """Let aiohttp parse what belongs to the present request, and read on if nothing is left."""
        if not self._in_head:
            length = min(self._body_bytes_left, len(self._ahead))
            self._body_bytes_left -= length
            self._parse_next(length)
            if self._is_answered and not self._body_bytes_left:
                self._in_head, self._head_bytes, self._head_tail = True, 0, b""
        if self._in_head:
            self._parse_head()
        if self.transport is None:
            self._ahead = b""
        elif self._ahead:
            self._is_held = True
            self.transport.pause_reading()
        elif self._is_held:
            self._is_held = False
            self.resume_reading()

    def _parse_head(self) -> None:
        joined = self._head_tail + self._ahead
        end = joined.find(_HEAD_END)
        length = len(self._ahead) if end < 0 else end + len(_HEAD_END) - len(self._head_tail)
        self._head_bytes += length
        if self._head_bytes <= _MOST_HEAD_BYTES:
            self._head_tail = joined[1 - len(_HEAD_END) :]
            self._in_head = end < 0
            self._parse_next(length)
        elif self.transport is not None:
            self._ahead = b""
            self.transport.write(_TOO_LARGE_HEAD)
            self.transport.close()

    def _parse_next(self, length: int) -> None:
        data, self._ahead = self._ahead[:length], self._ahead[length:]
        if not data:
            return
        if not self.asks:
            self.looks, self.asks = 0, True
        super().data_received(data)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._lost(self)
        super().connection_lost(exc)


class _Connections:
    """All connections of one port."""

    def __init__(self, server: web.Server, context: ssl.SSLContext | None, most: int, ask_seconds: float) -> None:
        self._server = server
        self._context = context
        self._most = most
        self._ask_seconds = ask_seconds
        self._open: set[_Connection] = set()
        self._any_open = asyncio.Event()

    async def accept(self, listening: socket.socket) -> None:
        """Accept connections for ever."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, _ = await loop.sock_accept(listening)
            except OSError as error:
                # No descriptor is left, or the client has gone. The next attempt may succeed, a moment later.
                log.warning("connection.refused", error=str(error))
                await asyncio.sleep(_ROOM_SECONDS)
                continue
            await self._room()
            connection = _Connection(self._server, self._lost)
            self._open.add(connection)
            self._any_open.set()
            connection.connecting = asyncio.create_task(self._connect(connection, accepted))

    async def look(self) -> None:
        """Check all connections for ever, and close those that are late."""
        while True:
            await self._any_open.wait()
            await asyncio.sleep(_LOOK_SECONDS)
            for one in tuple(self._open):
                one.looks += 1
                if one.busy() and one.looks * _LOOK_SECONDS > self._ask_seconds:
                    self._end(one)

    def close(self) -> None:
        """End the connections that are left, which are still in their TLS handshake."""
        for one in tuple(self._open):
            self._end(one)

    async def _room(self) -> None:
        """Wait until there is room, and close the connection that has waited longest once it is overdue."""
        while len(self._open) >= self._most:
            first = min(self._open, key=lambda one: (not one.asks, -one.looks))
            if first.looks >= _HONEST_LOOKS:
                self._end(first)
            else:
                await asyncio.sleep(_ROOM_SECONDS)

    def _end(self, connection: _Connection) -> None:
        self._lost(connection)
        connection.end()

    def _lost(self, connection: _Connection) -> None:
        self._open.discard(connection)
        if not self._open:
            self._any_open.clear()

    async def _connect(self, connection: _Connection, accepted: socket.socket) -> None:
        seconds = None if self._context is None else self._ask_seconds
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: connection, accepted, ssl=self._context, ssl_handshake_timeout=seconds
            )
        except OSError:
            self._lost(connection)  # the client spoke no TLS, an incompatible version, or not at all


def _listen(host: str, port: int, option: str) -> socket.socket:
    """Listen on an address. An empty host means every address of this machine, IPv6 included. Raises KeepstepError."""
    try:
        if not host and socket.has_dualstack_ipv6():
            listening = socket.create_server((host, port), family=socket.AF_INET6, dualstack_ipv6=True)
        else:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listening = socket.create_server((host, port), family=family)
    except OSError as error:
        raise KeepstepError(
            ErrorKind.BAD_CONFIGURATION,
            f"cannot listen on {host}:{port}: {error}",
            hint=f"give {option} as host:port with a free port",
        ) from error
    listening.setblocking(False)
    # Accepted connections inherit it.
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER_BYTES)
    return listening

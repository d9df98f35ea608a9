"""A port with a bound on its connections, and on the time that each may take to ask for something.

Owns the listening socket and who may stay. A connection waits for a request from its beginning, TLS handshake and all,
or from the first byte after an answer; until then it is idle. Who does not get a request across within `ask_seconds` is
cut off. Where all places are taken, a newcomer gets the place of whoever has waited longest, if that was for longer
than an honest request takes, and otherwise stays in the kernel's queue for a moment. So strangers that hold connections
open cost memory for `most` of them, and keep nobody out. Time is counted in looks at all connections: what we spend on
another's review makes nobody late.
"""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from typing import Final, cast

import structlog
from aiohttp import web

from mooring_agent.core.errors import ErrorKind, MooringError

_LOOK_SECONDS: Final = 0.5
_HONEST_LOOKS: Final = 2
"""An honest request has come before it is looked at twice."""
_ROOM_SECONDS: Final = 0.05
_FINISH_SECONDS: Final = 10.0
_LINGER_SECONDS: Final = 1.0
_KEEP_ALIVE_SECONDS: Final = 120.0
"""Longer than the API server keeps an idle connection: it must never write into one that we are closing."""

log = structlog.get_logger("mooring.webhook")


@contextlib.asynccontextmanager
async def serving(
    application: web.Application,
    address: tuple[str, int],
    context: ssl.SSLContext | None,
    *,
    most: int,
    ask_seconds: float,
) -> AsyncIterator[None]:
    """Serve while the context is open; on its way out what has begun is answered. Raises MooringError."""
    listening = _listen(*address)
    # Compressed bodies stay what they are: nothing may grow once it is here.
    runner = web.AppRunner(
        application,
        access_log=None,
        auto_decompress=False,
        keepalive_timeout=_KEEP_ALIVE_SECONDS,
        lingering_time=_LINGER_SECONDS,
        shutdown_timeout=_FINISH_SECONDS,
    )
    connections = _Connections(runner, context, most, ask_seconds)
    application.on_response_prepare.append(connections.answered)
    await runner.setup()
    tasks = [asyncio.create_task(one) for one in (connections.accept(listening), connections.look())]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        listening.close()
        await runner.cleanup()
        connections.close()


class _Connection(asyncio.Protocol):
    """Hands everything on to the HTTP server's own protocol. It `asks`, or is idle, for so many `looks`."""

    def __init__(self, inner: asyncio.Protocol, lost: Callable[["_Connection"], None]) -> None:
        self.inner = inner
        self.looks = 0
        self.asks = True
        self.connecting: asyncio.Task[None] | None = None
        self._lost = lost
        self._transport: asyncio.Transport | None = None

    def answered(self) -> None:
        self.looks, self.asks = 0, False

    def busy(self) -> bool:
        """With a request that has not come, or an answer that nobody takes."""
        return self.asks or (self._transport is not None and self._transport.get_write_buffer_size() > 0)

    def end(self) -> None:
        if self._transport is not None:
            self._transport.abort()
        elif self.connecting is not None:
            self.connecting.cancel()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if not self.asks:
            self.looks, self.asks = 0, True
        self.inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self.inner.eof_received()

    def pause_writing(self) -> None:
        self.inner.pause_writing()

    def resume_writing(self) -> None:
        self.inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost(self)
        self.inner.connection_lost(exc)


class _Connections:
    """All of one port, by the HTTP server's protocol of each."""

    def __init__(self, runner: web.AppRunner, context: ssl.SSLContext | None, most: int, ask_seconds: float) -> None:
        self._runner = runner
        self._context = context
        self._most = most
        self._ask_seconds = ask_seconds
        self._open: dict[object, _Connection] = {}

    async def accept(self, listening: socket.socket) -> None:
        """For ever."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, _ = await loop.sock_accept(listening)
            except OSError as error:
                # No descriptors are left, or the caller has gone: the next may be luckier, a moment later.
                log.warning("connection.refused", error=str(error))
                await asyncio.sleep(_ROOM_SECONDS)
                continue
            await self._room()
            server = self._runner.server
            assert server is not None, "accepting only while the runner is set up"
            connection = _Connection(server(), self._lost)
            self._open[connection.inner] = connection
            connection.connecting = asyncio.create_task(self._connect(connection, accepted))

    async def look(self) -> None:
        """For ever."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            for one in tuple(self._open.values()):
                one.looks += 1
                if one.busy() and one.looks * _LOOK_SECONDS > self._ask_seconds:
                    self._end(one)

    async def answered(self, request: web.Request, _: web.StreamResponse) -> None:
        """aiohttp's signal before each answer."""
        connection = self._open.get(request.protocol)
        if connection is not None:
            connection.answered()

    def close(self) -> None:
        """Whatever is still shaking hands."""
        for one in tuple(self._open.values()):
            self._end(one)

    async def _room(self) -> None:
        """Until there is a place."""
        while len(self._open) >= self._most:
            first = min(self._open.values(), key=lambda one: (not one.asks, -one.looks))
            if first.looks >= _HONEST_LOOKS:
                self._end(first)
            else:
                await asyncio.sleep(_ROOM_SECONDS)

    def _end(self, connection: _Connection) -> None:
        self._lost(connection)
        connection.end()

    def _lost(self, connection: _Connection) -> None:
        self._open.pop(connection.inner, None)

    async def _connect(self, connection: _Connection, accepted: socket.socket) -> None:
        seconds = None if self._context is None else self._ask_seconds
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: connection, accepted, ssl=self._context, ssl_handshake_timeout=seconds
            )
        except OSError:
            self._lost(connection)  # no TLS, another one than ours, or nothing at all: theirs to say


def _listen(host: str, port: int) -> socket.socket:
    """An empty host is every address of this machine, of IPv6 too."""
    try:
        if not host and socket.has_dualstack_ipv6():
            listening = socket.create_server((host, port), family=socket.AF_INET6, dualstack_ipv6=True)
        else:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listening = socket.create_server((host, port), family=family)
    except OSError as error:
        raise MooringError(
            ErrorKind.BAD_CONFIGURATION,
            f"cannot listen on {host}:{port}: {error}",
            hint="give another address, or end whatever holds this one",
        ) from error
    listening.setblocking(False)
    return listening

"""A listening port that bounds the number of connections and the time that each may take for a request.

A connection owes a request from its start, TLS handshake included, and after an answer from the next byte that it
sends; in between it is idle. It is closed if the request does not arrive within `ask_seconds`. When the port is full,
a new connection takes the place of the one that has waited longest, if that has waited longer than an honest request
takes; else the new one stays in the kernel's queue for a moment. So clients that hold connections open cost the memory
of at most `most` connections and keep nobody out. Time is counted in regular checks of all connections, so the time
that we spend on one review makes no other connection late.
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
"""An honest request has arrived before its connection is checked twice."""
_ROOM_SECONDS: Final = 0.05
_FINISH_SECONDS: Final = 10.0
_LINGER_SECONDS: Final = 1.0
_KEEP_ALIVE_SECONDS: Final = 120.0
"""Longer than the API server keeps an idle connection, so that it never writes into one that we are closing."""

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
    """Serve while the context is open. On exit, requests that have begun are answered. Raises MooringError."""
    listening = _listen(*address)
    # Bodies are not decompressed, so that nothing grows after it was received.
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
    """Passes everything on to the HTTP server's own protocol.

    `looks` counts the checks since the connection began to owe a request (`asks`) or became idle.
    """

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
        """Whether a request is not answered yet, or the client does not take its answer."""
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
    """All connections of one port, by their HTTP server protocol."""

    def __init__(self, runner: web.AppRunner, context: ssl.SSLContext | None, most: int, ask_seconds: float) -> None:
        self._runner = runner
        self._context = context
        self._most = most
        self._ask_seconds = ask_seconds
        self._open: dict[object, _Connection] = {}

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
            server = self._runner.server
            assert server is not None, "accepting only while the runner is set up"
            connection = _Connection(server(), self._lost)
            self._open[connection.inner] = connection
            connection.connecting = asyncio.create_task(self._connect(connection, accepted))

    async def look(self) -> None:
        """Check all connections for ever, and close those that are late."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            for one in tuple(self._open.values()):
                one.looks += 1
                if one.busy() and one.looks * _LOOK_SECONDS > self._ask_seconds:
                    self._end(one)

    async def answered(self, request: web.Request, _: web.StreamResponse) -> None:
        """Handle aiohttp's signal before each answer."""
        connection = self._open.get(request.protocol)
        if connection is not None:
            connection.answered()

    def close(self) -> None:
        """End the connections that are left, which are still in their TLS handshake."""
        for one in tuple(self._open.values()):
            self._end(one)

    async def _room(self) -> None:
        """Wait until there is room, and close the connection that has waited longest once it is overdue."""
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
            self._lost(connection)  # the client spoke no TLS, an incompatible version, or not at all


def _listen(host: str, port: int) -> socket.socket:
    """Listen on an address. An empty host means every address of this machine, IPv6 included. Raises MooringError."""
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
            hint="use another address, or stop what listens on this one",
        ) from error
    listening.setblocking(False)
    return listening

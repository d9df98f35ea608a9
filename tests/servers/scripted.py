"""An HTTP server that answers whatever a test wants, in the test's own event loop, and remembers what it was sent."""

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from tests.servers.tls import Certificate


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request, with its body."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes


Answer = Callable[[Asked, asyncio.StreamWriter], Awaitable[None]]
"""Writes the answer to one request; ConnectionError or a closed writer end the connection."""


class ScriptedServer:
    """While the context is open it serves at `url`. `connections` counts who came, also those that asked nothing."""

    def __init__(self, answer: Answer, *, certificate: Certificate | None = None) -> None:
        self.url = ""
        self.connections = 0
        self.asked: list[Asked] = []
        self._answer = answer
        self._certificate = certificate
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        tls = None
        if self._certificate:
            tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            tls.load_cert_chain(self._certificate.certificate, self._certificate.key)
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0, ssl=tls)
        port = self._server.sockets[0].getsockname()[1]
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{port}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task
        self._tasks.add(task)
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                while not writer.is_closing():
                    await self._exchange(reader, writer)
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, target, _ = head[0].split(" ", 2)
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
        if headers.get("expect") == "100-continue":
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        asked = Asked(method=method, target=target, headers=headers, body=body)
        self.asked.append(asked)
        await self._answer(asked, writer)
        await writer.drain()


def response(status: int, body: bytes = b"", **headers: str) -> bytes:
    """A whole answer; underscores in names of headers become hyphens."""
    lines = [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    head = "\r\n".join([f"HTTP/1.1 {status} Scripted", *lines, f"Content-Length: {len(body)}", "", ""])
    return head.encode() + body

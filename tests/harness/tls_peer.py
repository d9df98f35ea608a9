"""The other end of a TLS connection, by OpenSSL in a thread of its own, and a protocol that remembers what it heard."""

import asyncio
import socket
import ssl
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop
from tests.servers.tls import Certificate

WAIT_SECONDS = 60.0

Run = Callable[[Coroutine[Any, Any, None]], None]
on_both_loops = pytest.mark.parametrize("run", [asyncio.run, uvloop.run])


class Peer(threading.Thread):
    """The other end of one connection; `serve` has it in a thread of its own."""

    def __init__(self, certificate: Certificate, serve: Callable[[ssl.SSLSocket], None]) -> None:
        super().__init__(daemon=True)
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.load_cert_chain(certificate.certificate, certificate.key)
        self.error: Exception | None = None
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(WAIT_SECONDS)
        self._serve = serve
        self.address = self._listener.getsockname()

    def run(self) -> None:
        try:
            with self._listener, self._listener.accept()[0] as plain:
                plain.settimeout(WAIT_SECONDS)
                with self.context.wrap_socket(plain, server_side=True, suppress_ragged_eofs=False) as connection:
                    self._serve(connection)
        except Exception as error:
            self.error = error


class Recorder(asyncio.Protocol):
    """What a transport says."""

    def __init__(self) -> None:
        self.received = bytearray()
        self.changed = asyncio.Event()
        self.lost: list[Exception | None] = []
        self.pauses = self.resumes = 0

    def data_received(self, data: bytes) -> None:
        self.received += data
        self.changed.set()

    def pause_writing(self) -> None:
        self.pauses += 1

    def resume_writing(self) -> None:
        self.resumes += 1
        self.changed.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.append(exc)
        self.changed.set()

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_SECONDS):
            while not holds():
                self.changed.clear()
                await self.changed.wait()

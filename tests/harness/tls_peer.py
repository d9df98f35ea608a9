"""Both ends of a TLS connection: OpenSSL in a thread of its own, and a protocol that remembers what it heard."""

import asyncio
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvloop
from tests.harness.bounds import HANG_SECONDS
from tests.servers.tls import Certificate

from keepstep_agent.adapters.transfer.tls_connector import open_tls_connection
from keepstep_agent.adapters.transfer.tls_transport import TlsTransport
from keepstep_agent.core.settings.values import MIB

MORE_THAN_THE_KERNEL_HOLDS = 24 * MIB

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
        self._listener.settimeout(HANG_SECONDS)
        self._serve = serve
        self.address = self._listener.getsockname()

    def run(self) -> None:
        try:
            with self._listener, self._listener.accept()[0] as plain:
                plain.settimeout(HANG_SECONDS)
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
        async with asyncio.timeout(HANG_SECONDS):
            while not holds():
                self.changed.clear()
                await self.changed.wait()


@asynccontextmanager
async def connected(
    certificate: Certificate,
    serve: Callable[[ssl.SSLSocket], None],
    protocol: asyncio.BaseProtocol | None = None,
    version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3,
) -> AsyncIterator[tuple[TlsTransport, Peer]]:
    """A transport whose other end `serve` has. Afterwards it is aborted, and the peer has ended."""
    peer = Peer(certificate, serve)
    peer.context.maximum_version = version
    peer.start()
    context = ssl.create_default_context(cafile=str(certificate.certificate))
    plain = await asyncio.to_thread(socket.create_connection, peer.address)
    plain.setblocking(False)
    async with asyncio.timeout(HANG_SECONDS):
        transport = await open_tls_connection(protocol or Recorder(), plain, context, "127.0.0.1")
    try:
        yield transport, peer
    finally:
        transport.abort()
        await asyncio.to_thread(peer.join, HANG_SECONDS)
        assert not peer.is_alive()


def body_of(size: int) -> bytes:
    return bytes(range(251)) * (size // 251) + bytes(size % 251)

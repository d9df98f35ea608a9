"""TLS over a socket of our own, against a real OpenSSL, on both event loops: what is sent and heard."""

import asyncio
import select
import ssl
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.harness.bounds import HANG_SECONDS
from tests.harness.tls_peer import (
    MORE_THAN_THE_KERNEL_HOLDS,
    Recorder,
    Run,
    body_of,
    connected,
    on_both_loops,
)
from tests.regions import make_file, region_of
from tests.servers.tls import Certificate

from keepstep_agent.adapters.checksum import crc64nvme
from keepstep_agent.adapters.region_file import RegionFile
from keepstep_agent.adapters.transfer import tls_transport
from keepstep_agent.adapters.transfer.socket_writers import BufferWriter
from keepstep_agent.adapters.transfer.tls_transport import TlsTransport
from keepstep_agent.core.settings.values import MIB


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as executor:
        yield executor


@on_both_loops
@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_more_than_the_kernel_holds_goes_there_and_comes_back(
    version: ssl.TLSVersion, run: Run, certificate: Certificate
) -> None:
    sent = body_of(MORE_THAN_THE_KERNEL_HOLDS)
    full = threading.Event()

    def echo(connection: ssl.SSLSocket) -> None:
        assert full.wait(HANG_SECONDS)
        received = _receive(connection, len(sent))
        connection.sendall(received)

    async def there_and_back() -> None:
        recorder = Recorder()
        async with connected(certificate, echo, recorder, version) as (transport, _):
            transport.write(sent[:10])
            transport.write(memoryview(sent)[10:])
            assert transport.get_write_buffer_size() > 0
            assert recorder.pauses == 1
            full.set()
            await recorder.until(lambda: len(recorder.received) == len(sent))
            assert transport.get_write_buffer_size() == 0
            assert recorder.resumes == 1
            assert recorder.received == sent

    run(there_and_back())


@on_both_loops
@pytest.mark.parametrize("paused", [False, True])
def test_who_hears_one_record_has_a_turn_before_the_next(paused: bool, run: Run, certificate: Certificate) -> None:
    """A thread receives the body of an answer at a fraction of the event loop's cost, if it is there in time."""
    sent = body_of(20 * 1024)
    waits, arrived = threading.Event(), threading.Event()

    def send(connection: ssl.SSLSocket) -> None:
        assert waits.wait(HANG_SECONDS)
        connection.send(sent[:100])
        connection.sendall(sent[100:])
        arrived.set()
        connection.recv(1)  # until the other end is gone

    class Pausing(Recorder):
        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            asyncio.get_running_loop().call_soon(self.pause)

        def pause(self) -> None:
            transports[0].pause_reading()
            self.changed.set()

    transports: list[TlsTransport] = []

    async def listen() -> None:
        recorder = Pausing()
        async with connected(certificate, send, recorder) as (transport, _):
            transports.append(transport)
            await asyncio.sleep(0)  # it looks once for what came with the handshake
            if paused:
                transport.pause_reading()
            waits.set()
            # All of it has come before the event loop looks again.
            assert arrived.wait(HANG_SECONDS)
            transport.resume_reading()
            await recorder.until(lambda: not transport.is_reading())
            assert recorder.received == sent[:100]

    run(listen())


@on_both_loops
def test_a_sender_that_never_pauses_is_read_at_most_twice_a_turn(
    run: Run, certificate: Certificate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once because the socket is readable, and once for what OpenSSL may hold: not once more in each turn."""
    turns, takes = 100, 0

    def take(_: TlsTransport) -> int:
        nonlocal takes
        takes += 1
        return tls_transport._TURN_BYTES

    def send(connection: ssl.SSLSocket) -> None:
        connection.sendall(b"never taken, so that the socket stays readable")
        connection.recv(1)  # until the other end is gone

    async def listen() -> None:
        nonlocal takes
        async with connected(certificate, send) as (transport, _):
            monkeypatch.setattr(TlsTransport, "_take", take)
            await asyncio.to_thread(select.select, [transport.get_extra_info("socket")], [], [], HANG_SECONDS)
            takes = 0  # while it waited for that thread, the event loop took any number of turns
            for _ in range(turns):
                await asyncio.sleep(0)
        assert turns / 2 < takes <= 3 * turns

    run(listen())


@on_both_loops
def test_a_thread_sends_a_file_through_a_socket_that_fills_up(
    run: Run, certificate: Certificate, tmp_path: Path, executor: ThreadPoolExecutor
) -> None:
    path = make_file(tmp_path / "file", MORE_THAN_THE_KERNEL_HOLDS)
    full = threading.Event()
    received = bytearray()

    def receive(connection: ssl.SSLSocket) -> None:
        # It speaks first: who has lent the connection hears it all the same.
        connection.sendall(b"early")
        assert full.wait(HANG_SECONDS)
        received.extend(_receive(connection, MORE_THAN_THE_KERNEL_HOLDS))

    async def send() -> None:
        recorder = Recorder()
        async with connected(certificate, receive, recorder) as (transport, peer):
            with RegionFile(region_of(path)) as file:
                connection = transport.get_extra_info("socket")
                buffer = memoryview(bytearray(MIB))
                writer = BufferWriter(file, connection, buffer, lambda: None, sums_up=True)
                position = waits = 0
                while position < MORE_THAN_THE_KERNEL_HOLDS:
                    position += await transport.lend(
                        executor, writer.send, position, MORE_THAN_THE_KERNEL_HOLDS - position
                    )
                    if position < MORE_THAN_THE_KERNEL_HOLDS:
                        waits += 1
                        full.set()
                        await transport.writable()
            await asyncio.to_thread(peer.join, HANG_SECONDS)
            assert peer.error is None
            assert waits
            assert recorder.received == b"early"
            assert writer.checksum == crc64nvme(path.read_bytes())

    run(send())
    assert received == path.read_bytes()


@on_both_loops
def test_a_connection_is_not_closed_while_a_thread_has_it(
    run: Run, certificate: Certificate, executor: ThreadPoolExecutor
) -> None:
    working, released = threading.Event(), threading.Event()
    found: list[int] = []

    def work(connection: ssl.SSLSocket) -> int:
        working.set()
        assert released.wait(HANG_SECONDS)
        found.append(connection.fileno())
        return 0

    async def cancel() -> None:
        recorder = Recorder()
        async with connected(certificate, lambda connection: _until_closed(connection), recorder) as (transport, _):
            connection = transport.get_extra_info("socket")
            lending = asyncio.create_task(transport.lend(executor, work, connection))
            assert await asyncio.to_thread(working.wait, HANG_SECONDS)
            lending.cancel()
            await asyncio.wait([lending])
            transport.abort()
            assert recorder.lost == []
            released.set()
            await recorder.until(lambda: bool(recorder.lost))
            assert connection.fileno() == -1
        assert recorder.lost == [None]

    run(cancel())
    assert found[0] >= 0


class Filling(asyncio.Protocol):
    """Pauses when it has so much, or more."""

    def __init__(self, size_bytes: int) -> None:
        self.received = bytearray()
        self.full = asyncio.Event()
        self.lost = asyncio.Event()
        self.transport: Any = None
        self._size_bytes = size_bytes

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        assert not self.full.is_set(), "reading was paused"
        self.received += data
        if len(self.received) >= self._size_bytes:
            self.transport.pause_reading()
            self.full.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set()


@on_both_loops
def test_all_that_a_peer_sent_before_it_closed_arrives_however_late_there_is_room(
    run: Run, certificate: Certificate
) -> None:
    sent = body_of(3 * MIB + 777)

    async def receive() -> None:
        first, second = Filling(2 * MIB), Filling(4 * MIB)
        async with connected(certificate, partial(_send_and_go, data=sent), first) as (transport, peer):
            async with asyncio.timeout(HANG_SECONDS):
                await first.full.wait()
            await asyncio.to_thread(peer.join, HANG_SECONDS)
            assert not transport.is_reading()
            assert not first.lost.is_set()
            transport.set_protocol(second)
            transport.resume_reading()
            async with asyncio.timeout(HANG_SECONDS):
                await second.lost.wait()
        assert bytes(first.received + second.received) == sent

    run(receive())


def _receive(connection: ssl.SSLSocket, size: int) -> bytes:
    received = bytearray()
    while len(received) < size and (data := connection.recv(MIB)):
        received.extend(data)
    return bytes(received)


def _send_and_go(connection: ssl.SSLSocket, data: bytes) -> None:
    connection.sendall(data)
    connection.setblocking(False)
    with suppress(ssl.SSLWantReadError):  # it says goodbye and does not wait for ours
        connection.unwrap()


def _until_closed(connection: ssl.SSLSocket) -> None:
    try:
        while connection.recv(MIB):
            pass
    except OSError:
        return

"""TLS over a socket of our own, against a real OpenSSL at the other end, on both event loops and in both versions."""

import asyncio
import os
import select
import socket
import ssl
import struct
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.harness.tls_peer import WAIT_SECONDS, Peer, Recorder, Run, on_both_loops
from tests.regions import make_file, region_of
from tests.servers.tls import Certificate

from mooring_agent.adapters.checksum import crc64nvme
from mooring_agent.adapters.region_file import RegionFile
from mooring_agent.adapters.transfer import tls_transport
from mooring_agent.adapters.transfer.socket_writers import BufferWriter
from mooring_agent.adapters.transfer.tls_connector import open_tls_connection
from mooring_agent.adapters.transfer.tls_transport import TlsTransport
from mooring_agent.core.settings.values import MIB

MORE_THAN_THE_KERNEL_HOLDS = 24 * MIB


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
    async with asyncio.timeout(WAIT_SECONDS):
        transport = await open_tls_connection(protocol or Recorder(), plain, context, "127.0.0.1")
    try:
        yield transport, peer
    finally:
        transport.abort()
        await asyncio.to_thread(peer.join, WAIT_SECONDS)
        assert not peer.is_alive()


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as executor:
        yield executor


@on_both_loops
@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_more_than_the_kernel_holds_goes_there_and_comes_back(
    version: ssl.TLSVersion, run: Run, certificate: Certificate
) -> None:
    sent = _bytes(MORE_THAN_THE_KERNEL_HOLDS)
    full = threading.Event()

    def echo(connection: ssl.SSLSocket) -> None:
        assert full.wait(WAIT_SECONDS)
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
    sent = _bytes(20 * 1024)
    waits, arrived = threading.Event(), threading.Event()

    def send(connection: ssl.SSLSocket) -> None:
        assert waits.wait(WAIT_SECONDS)
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
            assert arrived.wait(WAIT_SECONDS)
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
            await asyncio.to_thread(select.select, [transport.get_extra_info("socket")], [], [], WAIT_SECONDS)
            takes = 0  # while it waited for that thread, the event loop took any number of turns
            for _ in range(turns):
                await asyncio.sleep(0)
        assert turns / 2 < takes <= 3 * turns

    run(listen())


@on_both_loops
def test_what_a_closed_transport_had_not_sent_yet_arrives_and_so_does_the_goodbye(
    run: Run, certificate: Certificate
) -> None:
    sent = _bytes(MORE_THAN_THE_KERNEL_HOLDS)
    closed = threading.Event()
    received = bytearray()

    def read_to_the_end(connection: ssl.SSLSocket) -> None:
        assert closed.wait(WAIT_SECONDS)
        while data := connection.recv(MIB):  # ssl.SSLEOFError without a goodbye
            received.extend(data)

    async def close() -> None:
        recorder = Recorder()
        async with connected(certificate, read_to_the_end, recorder) as (transport, peer):
            transport.write(sent)
            transport.close()
            assert transport.is_closing()
            assert recorder.lost == []
            closed.set()
            await recorder.until(lambda: bool(recorder.lost))
            await asyncio.to_thread(peer.join, WAIT_SECONDS)
            assert peer.error is None
        assert recorder.lost == [None]

    run(close())
    assert received == sent


@on_both_loops
def test_an_aborted_transport_sends_no_more_and_wakes_who_waits_for_room(run: Run, certificate: Certificate) -> None:
    over = threading.Event()

    async def abort() -> None:
        recorder = Recorder()
        async with connected(certificate, lambda _: _expect(over.wait(WAIT_SECONDS)), recorder) as (transport, _):
            transport.write(_bytes(MORE_THAN_THE_KERNEL_HOLDS))
            waiting = asyncio.create_task(transport.writable())
            await asyncio.sleep(0)
            transport.abort()
            transport.abort()
            async with asyncio.timeout(WAIT_SECONDS):
                await waiting
            await recorder.until(lambda: bool(recorder.lost))
            over.set()
        assert recorder.lost == [None]

    run(abort())


@on_both_loops
def test_a_peer_that_breaks_off_is_an_error_for_who_writes(run: Run, certificate: Certificate) -> None:
    async def write() -> None:
        recorder = Recorder()
        async with connected(certificate, _break_off, recorder) as (transport, _):
            transport.write(_bytes(MORE_THAN_THE_KERNEL_HOLDS))
            await recorder.until(lambda: bool(recorder.lost))
            await transport.writable()
            with pytest.raises(ConnectionResetError), ThreadPoolExecutor(1) as threads:
                await transport.lend(threads, lambda: 0)
        assert isinstance(recorder.lost[0], OSError)
        assert len(recorder.lost) == 1

    run(write())


@on_both_loops
def test_a_reset_is_an_error_for_who_only_listens_too(run: Run, certificate: Certificate) -> None:
    async def listen() -> None:
        recorder = Recorder()
        async with connected(certificate, _break_off, recorder) as (transport, _):
            transport.write(b"x")
            await recorder.until(lambda: bool(recorder.lost))
        assert isinstance(recorder.lost[0], ConnectionResetError)

    run(listen())


@on_both_loops
def test_a_peer_that_leaves_while_somebody_waits_for_room_leaves_no_socket_and_no_watch(
    run: Run, certificate: Certificate
) -> None:
    """A loop that still watched the closed one would take the next connection for it."""
    leave = threading.Event()

    def say_goodbye(connection: ssl.SSLSocket) -> None:
        assert leave.wait(WAIT_SECONDS)
        connection.setblocking(False)
        with suppress(ssl.SSLWantReadError):
            connection.unwrap()
        assert over.wait(WAIT_SECONDS)

    over = threading.Event()

    async def wait_for_room() -> None:
        recorder, second = Recorder(), Recorder()
        async with connected(certificate, say_goodbye, recorder) as (transport, _):
            connection = transport.get_extra_info("socket")
            number = connection.fileno()
            with ThreadPoolExecutor(1) as threads:
                await transport.lend(threads, _fill_up, connection)
            waiting = asyncio.create_task(transport.writable())
            await asyncio.sleep(0)
            leave.set()
            async with asyncio.timeout(WAIT_SECONDS):
                await waiting
            await recorder.until(lambda: bool(recorder.lost))
            assert connection.fileno() == -1
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.fstat(number)
            async with connected(certificate, lambda peer: peer.sendall(b"hello"), second):
                await second.until(lambda: second.received == b"hello")
            over.set()

    run(wait_for_room())


@on_both_loops
def test_a_peer_that_takes_nothing_holds_a_closed_connection_only_so_long(
    run: Run, certificate: Certificate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls_transport, "_CLOSE_SECONDS", 0.1)
    over = threading.Event()

    async def close() -> None:
        recorder = Recorder()
        async with connected(certificate, lambda _: _expect(over.wait(WAIT_SECONDS)), recorder) as (transport, _):
            transport.write(_bytes(MORE_THAN_THE_KERNEL_HOLDS))
            transport.close()
            await recorder.until(lambda: bool(recorder.lost))
            over.set()

    run(close())


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
        assert full.wait(WAIT_SECONDS)
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
            await asyncio.to_thread(peer.join, WAIT_SECONDS)
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
        assert released.wait(WAIT_SECONDS)
        found.append(connection.fileno())
        return 0

    async def cancel() -> None:
        recorder = Recorder()
        async with connected(certificate, lambda connection: _until_closed(connection), recorder) as (transport, _):
            connection = transport.get_extra_info("socket")
            lending = asyncio.create_task(transport.lend(executor, work, connection))
            assert await asyncio.to_thread(working.wait, WAIT_SECONDS)
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
    sent = _bytes(3 * MIB + 777)

    async def receive() -> None:
        first, second = Filling(2 * MIB), Filling(4 * MIB)
        async with connected(certificate, partial(_send_and_go, data=sent), first) as (transport, peer):
            async with asyncio.timeout(WAIT_SECONDS):
                await first.full.wait()
            await asyncio.to_thread(peer.join, WAIT_SECONDS)
            assert not transport.is_reading()
            assert not first.lost.is_set()
            transport.set_protocol(second)
            transport.resume_reading()
            async with asyncio.timeout(WAIT_SECONDS):
                await second.lost.wait()
        assert bytes(first.received + second.received) == sent

    run(receive())


def _bytes(size: int) -> bytes:
    return bytes(range(251)) * (size // 251) + bytes(size % 251)


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


def _break_off(connection: ssl.SSLSocket) -> None:
    connection.recv(1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _until_closed(connection: ssl.SSLSocket) -> None:
    try:
        while connection.recv(MIB):
            pass
    except OSError:
        return


def _fill_up(connection: ssl.SSLSocket) -> int:
    piece = bytes(MIB)
    with suppress(ssl.SSLWantWriteError):
        while True:
            connection.send(piece)
    return 0


def _expect(held: bool) -> None:
    assert held

"""How a TLS connection of our own ends, by either side, on both event loops."""

import asyncio
import os
import socket
import ssl
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

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
from tests.servers.tls import Certificate

from keepstep_agent.adapters.transfer import tls_transport
from keepstep_agent.core.settings.values import MIB


@on_both_loops
def test_what_a_closed_transport_had_not_sent_yet_arrives_and_so_does_the_goodbye(
    run: Run, certificate: Certificate
) -> None:
    sent = body_of(MORE_THAN_THE_KERNEL_HOLDS)
    closed = threading.Event()
    received = bytearray()

    def read_to_the_end(connection: ssl.SSLSocket) -> None:
        assert closed.wait(HANG_SECONDS)
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
            await asyncio.to_thread(peer.join, HANG_SECONDS)
            assert peer.error is None
        assert recorder.lost == [None]

    run(close())
    assert received == sent


@on_both_loops
def test_an_aborted_transport_sends_no_more_and_wakes_who_waits_for_room(run: Run, certificate: Certificate) -> None:
    over = threading.Event()

    async def abort() -> None:
        recorder = Recorder()
        async with connected(certificate, lambda _: _expect(over.wait(HANG_SECONDS)), recorder) as (transport, _):
            transport.write(body_of(MORE_THAN_THE_KERNEL_HOLDS))
            waiting = asyncio.create_task(transport.writable())
            await asyncio.sleep(0)
            transport.abort()
            transport.abort()
            async with asyncio.timeout(HANG_SECONDS):
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
            transport.write(body_of(MORE_THAN_THE_KERNEL_HOLDS))
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
        assert leave.wait(HANG_SECONDS)
        connection.setblocking(False)
        with suppress(ssl.SSLWantReadError):
            connection.unwrap()
        assert over.wait(HANG_SECONDS)

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
            async with asyncio.timeout(HANG_SECONDS):
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
        async with connected(certificate, lambda _: _expect(over.wait(HANG_SECONDS)), recorder) as (transport, _):
            transport.write(body_of(MORE_THAN_THE_KERNEL_HOLDS))
            transport.close()
            await recorder.until(lambda: bool(recorder.lost))
            over.set()

    run(close())


def _break_off(connection: ssl.SSLSocket) -> None:
    connection.recv(1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _fill_up(connection: ssl.SSLSocket) -> int:
    piece = bytes(MIB)
    with suppress(ssl.SSLWantWriteError):
        while True:
            connection.send(piece)
    return 0


def _expect(held: bool) -> None:
    assert held

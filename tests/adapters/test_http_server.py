"""How much of what a client sends the HTTP server holds, over real sockets."""

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from tests.harness.bounds import HANG_SECONDS

from keepstep_agent.adapters.http_server import serving

_MIB = 1024 * 1024
_LARGE_HEAD = b"GET /slow HTTP/1.1\r\nHost: x\r\n" + b"X-Header: %b\r\n" % (b"x" * 3000) * 9 + b"\r\n"
_SENT_AHEAD = 300
_SEND_BUFFER_BYTES = 128 * 1024
_KERNEL_BYTES = 4 * _MIB
"""What the kernel holds of a connection that nobody reads, on both sides."""


class _Served:
    """`/slow` answers once `go_on` is set, `/length` with the length of what it was sent."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.port = 0
        self.answered = 0
        self.begun = asyncio.Event()

    def application(self) -> web.Application:
        async def slow(_: web.Request) -> web.Response:
            self.begun.set()
            await self.go_on.wait()
            self.answered += 1
            return web.Response(text="done")

        async def length(request: web.Request) -> web.Response:
            return web.Response(text=str(len(await request.read())))

        application = web.Application()
        application.add_routes([web.get("/slow", slow), web.post("/length", length)])
        return application


@pytest.fixture
async def served() -> AsyncIterator[_Served]:
    one = _Served()
    application, address = one.application(), ("127.0.0.1", 0)
    async with serving(
        application, address, option="--address", most=16, ask_seconds=HANG_SECONDS, finish_seconds=0.1
    ) as (_, one.port):
        yield one


async def test_what_a_client_sends_ahead_is_read_after_its_request_is_answered(served: _Served) -> None:
    connection = socket.create_connection(("127.0.0.1", served.port), HANG_SECONDS)
    # By default the kernel takes as much as the machine's memory lets it.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
    reader, writer = await asyncio.open_connection(sock=connection)
    writer.write(_LARGE_HEAD * _SENT_AHEAD)
    await asyncio.wait_for(served.begun.wait(), HANG_SECONDS)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(writer.drain(), 1.0)
    unsent_bytes = writer.transport.get_write_buffer_size()
    assert len(_LARGE_HEAD) * _SENT_AHEAD - unsent_bytes < _KERNEL_BYTES
    served.go_on.set()
    for _ in range(_SENT_AHEAD):
        answer = await asyncio.wait_for(reader.readuntil(b"done"), HANG_SECONDS)
        assert answer.startswith(b"HTTP/1.1 200")
    assert served.answered == _SENT_AHEAD
    writer.close()


@pytest.mark.parametrize("piece_bytes", [1, 3, 1000])
async def test_requests_are_answered_whatever_the_pieces_they_come_in(served: _Served, piece_bytes: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sent = b"".join(
        b"POST /length HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (size, b"\r" * size)
        for size in (0, 1, 700, 5)
    )
    for at in range(0, len(sent), piece_bytes):
        writer.write(sent[at : at + piece_bytes])
        await asyncio.sleep(0)
    for size in (0, 1, 700, 5):
        answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), HANG_SECONDS)
        assert answer.startswith(b"HTTP/1.1 200")
        assert await reader.readexactly(len(str(size))) == str(size).encode()
    writer.close()


async def test_a_body_far_larger_than_the_buffers_arrives_whole(served: _Served) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    size = 900_000
    writer.write(b"POST /length HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % size + b"x" * size)
    assert await asyncio.wait_for(reader.readuntil(str(size).encode()), HANG_SECONDS)
    writer.close()


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        pytest.param(b"GET /length HTTP/1.1\r\n" + b"X: y\r\n" * 8000, b"431", id="a head without end"),
        pytest.param(b"GET /" + b"x" * 40_000, b"431", id="an address without end"),
        pytest.param(
            b"POST /length HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n", b"411", id="of no stated length"
        ),
        pytest.param(b"\x16\x03\x01 garbage\r\n\r\n", b"400", id="no HTTP"),
    ],
)
async def test_a_request_beyond_the_limits_is_refused(served: _Served, request_bytes: bytes, status: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    writer.write(request_bytes)
    assert (await asyncio.wait_for(reader.readline(), HANG_SECONDS)).split()[1] == status
    writer.close()

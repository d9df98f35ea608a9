"""Makes aiohttp send an UploadBody from our memory into the socket, without bytes objects in between.

aiobotocore and aiohttp keep signing, connections, headers, 100-continue, answers and errors. Without TLS the bytes go
directly to the connection's socket, because a transport copies what the kernel does not take at once. With our own TLS
a worker thread, to which the connection is lent, sends most of a file. The rest goes through the transport. When its
write buffer is empty, the transport has encrypted (and so copied) what it was given.
"""

import asyncio
import socket
import struct
from contextlib import closing
from typing import NoReturn

from aiohttp.abc import AbstractStreamWriter
from aiohttp.http_writer import StreamWriter
from aiohttp.payload import Payload

from keepstep_agent.adapters.transfer.thread_sockets import LentSocket
from keepstep_agent.adapters.transfer.tls_connector import until_ready
from keepstep_agent.adapters.transfer.tls_transport import TlsTransport
from keepstep_agent.adapters.transfer.upload_body import FileBody, UploadBody


class BodyPayload(Payload):
    """Writes an UploadBody to a connection."""

    _value: UploadBody
    _autoclose = True

    def __init__(self, value: UploadBody, *arguments: object, **options: object) -> None:
        super().__init__(value, *arguments, **options)  # type: ignore[arg-type]  # aiohttp's own options
        self._size = len(value)

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> NoReturn:
        raise AssertionError("a region never becomes a string")

    async def write(self, writer: AbstractStreamWriter) -> None:
        await self.write_with_length(writer, None)

    async def write_with_length(self, writer: AbstractStreamWriter, content_length: int | None) -> None:
        assert content_length in (None, len(self._value))
        assert isinstance(writer, StreamWriter)
        transport = writer.transport
        if transport is None:
            raise ConnectionResetError("the store closed the connection before the body was sent")
        try:
            _forget_unsent_on_close(transport)
            if transport.get_extra_info("sslcontext"):
                await _send_encrypted(self._value, writer, transport)
            else:
                await _send_plain(self._value, writer, transport)
        except BaseException:
            # `close` would first try to send what is buffered, and wait for a peer that may not read.
            transport.abort()
            raise


async def _send_plain(body: UploadBody, writer: StreamWriter, transport: asyncio.WriteTransport) -> None:
    # Flush the headers: our bytes must not overtake anything that the transport still holds.
    transport.set_write_buffer_limits(high=0)
    writer.send_headers()
    await writer.drain()
    transport.set_write_buffer_limits()
    with closing(LentSocket(transport)) as lent:
        pieces = body.pieces(*await body.send_plain(lent)) if isinstance(body, FileBody) else body.pieces()
        async for piece in pieces:
            await _send_all(lent.connection, piece)


async def _send_all(connection: socket.socket, piece: memoryview) -> None:
    while piece:
        try:
            piece = piece[connection.send(piece) :]
        except BlockingIOError:
            await until_ready(connection, writable=True)


async def _send_encrypted(body: UploadBody, writer: StreamWriter, transport: asyncio.WriteTransport) -> None:
    # Makes `drain` wait until nothing is left. With a limit of 0 asyncio's TLS would pause for ever on an empty buffer.
    transport.set_write_buffer_limits(high=0 if isinstance(transport, TlsTransport) else 1, low=0)
    pieces = body.pieces()
    if isinstance(body, FileBody) and isinstance(transport, TlsTransport):
        writer.send_headers()
        await writer.drain()
        pieces = body.pieces(*await body.send_encrypted(transport))
    async for piece in pieces:
        await writer.write(piece, drain=False)
        await writer.drain()
    transport.set_write_buffer_limits()


def _forget_unsent_on_close(transport: asyncio.WriteTransport) -> None:
    """Make a close reset the connection and drop what the kernel has not sent.

    The kernel still holds megabytes of a cancelled upload. On a slow line they would take seconds from the just-in-time
    save for which the upload was cancelled.
    """
    connection = transport.get_extra_info("socket")
    if connection is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

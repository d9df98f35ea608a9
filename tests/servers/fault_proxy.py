"""A proxy that breaks HTTP at will, between a client of ours and a real server.

It runs in a thread with its own event loop, so that synchronous tests and agents in other processes can use it. Rules
are named and hit in the order they were added; every request is logged, whether a rule hit it or not. Its clients may
come over TLS; to the server it speaks plain HTTP.
"""

import asyncio
import base64
import hashlib
import random
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable
from typing import Final

from awscrt import checksums
from tests.harness.bounds import HANG_SECONDS
from tests.servers.faults import Fault, Request, Rule
from tests.servers.tls import Certificate

_CHUNK_BYTES: Final = 64 * 1024
_HEAD_LIMIT_BYTES: Final = 256 * 1024
_RECEIVE_BUFFER_BYTES: Final = 128 * 1024
_CATCH_UP_SECONDS: Final = 0.5
"""A throttled store that was not given a processor for so long makes up for it, so that its rate is what was asked."""


_CHECKSUM_WANTED: Final = (
    b"<Error><Code>InvalidRequest</Code><Message>Content-MD5 OR x-amz-checksum- HTTP header is required for Put Object "
    b"requests with Object Lock parameters</Message></Error>"
)


class _BrokenError(Exception):
    """The connection ends here."""


class FaultProxy:
    """Listens on a free port of loopback and forwards to `server_port`."""

    def __init__(self, server_port: int, *, certificate: Certificate | None = None, seed: int = 0) -> None:
        self.endpoint_url = ""
        self.port = 0
        self.log: list[Request] = []
        self.connections = 0
        """How many clients have ever connected."""
        self.received_bytes = 0
        """Of all clients, heads and bodies."""
        self._server_port = server_port
        self._certificate = certificate
        self._tls: ssl.SSLContext | None = None
        self._generator = random.Random(seed)
        self._rules: list[Rule] = []
        self._down = False
        self._bytes_per_second = 0
        self._free_at = 0.0
        self._writers: set[asyncio.StreamWriter] = set()
        self._thread = threading.Thread(target=self._main, name="fault-proxy", daemon=True)
        self._ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None

    def start(self) -> None:
        self._thread.start()
        if not self._ready.wait(HANG_SECONDS):
            raise TimeoutError("the fault proxy did not start")

    def stop(self) -> None:
        assert self._stopping
        self._call(self._stopping.set)
        self._thread.join(HANG_SECONDS)

    def add(self, rule: Rule) -> None:
        self._call(lambda: self._rules.append(rule))

    def clear(self) -> None:
        """Forget all rules; the log stays."""
        self._call(self._rules.clear)

    @property
    def open_connections(self) -> int:
        """Connections of clients that are not yet over, on either side."""
        return len(self._writers)

    def hits(self, name: str) -> int:
        """How many requests the rule hit."""
        return sum(request.rule == name for request in self.log)

    def throttle(self, bytes_per_second: int) -> None:
        """One limit for all connections and both directions; 0: none."""
        self._call(lambda: setattr(self, "_bytes_per_second", bytes_per_second))

    def outage(self, down: bool) -> None:
        """While down, every connection is reset, those that are open too."""

        def switch() -> None:
            self._down = down
            for writer in list(self._writers) if down else ():
                _reset(writer)

        self._call(switch)

    def serve_with(self, certificate: Certificate) -> None:
        """Show another certificate from now on. Connections that are open end."""

        def switch() -> None:
            assert self._tls
            self._tls.load_cert_chain(certificate.certificate, certificate.key)
            for writer in list(self._writers):
                _reset(writer)

        self._call(switch)

    def _call(self, function: Callable[[], object]) -> None:
        """In the proxy's thread, done when this returns."""
        assert self._loop
        done = threading.Event()

        def run() -> None:
            function()
            done.set()

        self._loop.call_soon_threadsafe(run)
        if not done.wait(HANG_SECONDS):
            raise TimeoutError("the fault proxy does not answer")

    def _main(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        listener = socket.socket()
        # Loopback would else take whole parts into the kernel, where no throttle and no reset reaches them.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER_BYTES)
        listener.bind(("127.0.0.1", 0))
        if self._certificate:
            self._tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            self._tls.load_cert_chain(self._certificate.certificate, self._certificate.key)
        server = await asyncio.start_server(self._connected, sock=listener, limit=_HEAD_LIMIT_BYTES, ssl=self._tls)
        self.port = server.sockets[0].getsockname()[1]
        self.endpoint_url = f"{'https' if self._tls else 'http'}://127.0.0.1:{self.port}"
        self._ready.set()
        await self._stopping.wait()
        server.close()
        for writer in list(self._writers):
            writer.transport.abort()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        connection = _Connection(self, self._server_port, reader, writer)
        self._writers.add(writer)
        try:
            while not self._down:
                await connection.exchange()
            _reset(writer)
        except (_BrokenError, ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # asyncio cancels this task when the loop ends: nobody waits for it
        finally:
            self._writers.discard(writer)
            connection.close()

    def choose(self, request: Request) -> Rule | None:
        self.log.append(request)
        for rule in self._rules:
            if rule.matches(request, self._generator):
                rule.times -= 1
                request.rule = rule.name
                return rule
        return None

    async def pass_on(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        """Write within the shared limit."""
        await self.keep_to_limit(len(data))
        writer.write(data)
        await writer.drain()

    async def keep_to_limit(self, size: int) -> None:
        """Wait until so many bytes may pass."""
        if self._bytes_per_second:
            now = asyncio.get_running_loop().time()
            self._free_at = max(now - _CATCH_UP_SECONDS, self._free_at) + size / self._bytes_per_second
            await asyncio.sleep(max(0.0, self._free_at - now))


class _Connection:
    """One client's connection, with the one to the server that belongs to it."""

    def __init__(
        self, proxy: FaultProxy, server_port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._proxy = proxy
        self._server_port = server_port
        self._reader = reader
        self._writer = writer
        self._upstream: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    def close(self) -> None:
        self._writer.close()
        if self._upstream:
            # What the server has not read of a broken request, a mere close would wait for, at the end of the loop too.
            self._upstream[1].transport.abort()

    async def exchange(self) -> None:
        """One request and its answer. _BrokenError when the connection cannot go on."""
        head = await self._reader.readuntil(b"\r\n\r\n")
        self._proxy.received_bytes += len(head)
        request, size = _parse_request(head)
        rule = self._proxy.choose(request)
        if request.headers.get("expect", "").lower() == "100-continue":
            self._writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            head = _without_expect(head)
        if rule and rule.fault is Fault.DELAY:
            await asyncio.sleep(rule.seconds)
        if rule and rule.fault is Fault.STATUS:
            await self._read_body(request, size)
            return await self._answer(request, rule.status, rule.body)
        if rule and rule.fault is Fault.EARLY_SUCCESS:
            await self._answer(request, 200, b"", extra='ETag: "early"\r\n')
            await self._reader.read(-1)  # until the client gives up
            raise _BrokenError
        if rule and rule.fault in (Fault.CHECK_CRC64NVME, Fault.OBJECT_LOCK, Fault.OBJECT_LOCK_MD5):
            return await self._check(head, request, size, rule.fault)
        if not self._upstream:
            self._upstream = await asyncio.open_connection("127.0.0.1", self._server_port, limit=_HEAD_LIMIT_BYTES)
        await self._forward_request(head, request, size, rule)
        return await self._forward_response(request, rule)

    async def _forward_request(self, head: bytes, request: Request, size: int, rule: Rule | None) -> None:
        assert self._upstream
        writer = self._upstream[1]
        writer.write(head)
        copy = bytearray(head)
        fault = rule.fault if rule else None
        while request.body_bytes < size:
            data = await self._reader.read(min(size - request.body_bytes, _CHUNK_BYTES))
            if not data:
                writer.transport.abort()
                raise _BrokenError
            self._proxy.received_bytes += len(data)
            if rule:
                end = request.body_bytes + len(data)
                if fault is Fault.FLIP_REQUEST:
                    data = _flip(data, rule.after_bytes - request.body_bytes)
                if fault in (Fault.RESET_REQUEST, Fault.BLACKHOLE) and end >= rule.after_bytes:
                    writer.write(data[: rule.after_bytes - request.body_bytes])
                    await writer.drain()
                    break
                if fault is Fault.DUPLICATE:
                    copy += data
            await self._proxy.pass_on(writer, data)
            request.body_bytes += len(data)
        if fault is Fault.RESET_REQUEST:
            _reset(writer)
            _reset(self._writer)
            raise _BrokenError
        if fault is Fault.BLACKHOLE:
            await self._reader.read(-1)  # until the client gives up
            raise _BrokenError
        if fault is Fault.DUPLICATE:
            await self._send_again(bytes(copy))

    async def _send_again(self, request: bytes) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._server_port, limit=_HEAD_LIMIT_BYTES)
        writer.write(request)
        await writer.drain()
        await reader.readuntil(b"\r\n\r\n")
        writer.close()

    async def _forward_response(self, request: Request, rule: Rule | None) -> None:
        assert self._upstream
        reader = self._upstream[0]
        head = await reader.readuntil(b"\r\n\r\n")
        while head.startswith(b"HTTP/1.1 100"):
            head = await reader.readuntil(b"\r\n\r\n")
        if rule and rule.fault is Fault.LOSE_ANSWER:
            _reset(self._writer)
            raise _BrokenError
        headers = _parse_headers(head)
        request.status = int(head.split(b" ", 2)[1])
        self._writer.write(head)
        empty = request.method == "HEAD" or request.status in (204, 304)
        if headers.get("transfer-encoding") == "chunked" and not empty:
            await self._forward_chunks(reader)
        else:
            size = 0 if empty else int(headers.get("content-length", "0"))
            await self._forward_body(reader, size, rule)
        await self._writer.drain()
        request.answered_at = time.monotonic()
        if headers.get("connection", "").lower() == "close":
            raise _BrokenError

    async def _forward_chunks(self, reader: asyncio.StreamReader) -> None:
        while True:
            line = await reader.readline()
            size = int(line.split(b";")[0], 16)
            await self._proxy.pass_on(self._writer, line + await reader.readexactly(size + 2))
            if not size:
                return

    async def _forward_body(self, reader: asyncio.StreamReader, size: int, rule: Rule | None) -> None:
        sent = 0
        while sent < size:
            data = await reader.read(min(size - sent, _CHUNK_BYTES))
            if not data:
                raise _BrokenError
            if rule and rule.fault is Fault.FLIP_RESPONSE:
                data = _flip(data, rule.after_bytes - sent)
            if (
                rule
                and rule.fault in (Fault.RESET_RESPONSE, Fault.END_RESPONSE)
                and sent + len(data) >= rule.after_bytes
            ):
                self._writer.write(data[: rule.after_bytes - sent])
                await self._writer.drain()
                if rule.fault is Fault.RESET_RESPONSE:
                    _reset(self._writer)
                raise _BrokenError
            await self._proxy.pass_on(self._writer, data)
            sent += len(data)

    async def _check(self, head: bytes, request: Request, size: int, fault: Fault) -> None:
        body = await self._read_body(request, size)
        right = {
            "content-md5": hashlib.md5(body, usedforsecurity=False).digest(),
            "x-amz-checksum-crc64nvme": checksums.crc64nvme(body).to_bytes(8, "big"),
        }
        checked = {
            Fault.CHECK_CRC64NVME: ("x-amz-checksum-crc64nvme",),
            Fault.OBJECT_LOCK: tuple(right),
            Fault.OBJECT_LOCK_MD5: ("content-md5",),
        }[fault]
        sent = {name: request.headers[name] for name in checked if name in request.headers}
        if not sent and fault is not Fault.CHECK_CRC64NVME:
            return await self._answer(request, 400, _CHECKSUM_WANTED)
        if any(base64.b64decode(value) != right[name] for name, value in sent.items()):
            text = b"<Error><Code>BadDigest</Code><Message>The checksum did not match</Message></Error>"
            return await self._answer(request, 400, text)
        if fault is Fault.OBJECT_LOCK and "content-md5" not in sent:
            # moto, with Object Lock, takes no other checksum.
            md5 = base64.b64encode(right["content-md5"])
            head = head.removesuffix(b"\r\n") + b"Content-MD5: " + md5 + b"\r\n\r\n"
        if not self._upstream:
            self._upstream = await asyncio.open_connection("127.0.0.1", self._server_port, limit=_HEAD_LIMIT_BYTES)
        self._upstream[1].write(head + body)
        return await self._forward_response(request, None)

    async def _read_body(self, request: Request, size: int) -> bytes:
        body = bytearray()
        while len(body) < size:
            body += await self._reader.readexactly(min(size - len(body), _CHUNK_BYTES))
            request.body_bytes = len(body)
            await self._proxy.keep_to_limit(min(size, _CHUNK_BYTES))
        self._proxy.received_bytes += size
        return bytes(body)

    async def _answer(self, request: Request, status: int, body: bytes, *, extra: str = "") -> None:
        request.status = status
        head = (
            f"HTTP/1.1 {status} Canned\r\nContent-Type: application/xml\r\n{extra}Content-Length: {len(body)}\r\n\r\n"
        )
        self._writer.write(head.encode() + (b"" if request.method == "HEAD" else body))
        await self._writer.drain()


def _parse_request(head: bytes) -> tuple[Request, int]:
    method, target, _ = head.split(b"\r\n", 1)[0].decode().split(" ", 2)
    path, _, query = target.partition("?")
    headers = _parse_headers(head)
    return Request(method=method, path=path, query=query, headers=headers), int(headers.get("content-length", "0"))


def _parse_headers(head: bytes) -> dict[str, str]:
    lines = head.decode("latin-1").split("\r\n")[1:]
    return {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines) if name}


def _without_expect(head: bytes) -> bytes:
    return b"\r\n".join(line for line in head.split(b"\r\n") if not line.lower().startswith(b"expect:"))


def _flip(data: bytes, position: int) -> bytes:
    if not 0 <= position < len(data):
        return data
    changed = bytearray(data)
    changed[position] ^= 0x40
    return bytes(changed)


def _reset(writer: asyncio.StreamWriter) -> None:
    """RST instead of FIN."""
    connection = writer.get_extra_info("socket")
    if connection and connection.fileno() >= 0:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()

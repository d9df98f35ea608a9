"""How an object's bytes arrive, and come back as they left: over HTTP and TLS, on either event loop."""

import asyncio
import os
import ssl
import threading
import tracemalloc
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
import uvloop
from tests.harness.bounds import HANG_SECONDS
from tests.harness.open_files import until_open
from tests.regions import make_file, region_of
from tests.servers.fault_proxy import FaultProxy
from tests.servers.rclone import RcloneServer
from tests.servers.server import Bucket
from tests.servers.tls import Certificate

from keepstep_agent.adapters.checksum import crc64nvme, region_checksum
from keepstep_agent.adapters.open_store import open_store
from keepstep_agent.adapters.s3.store import S3Store
from keepstep_agent.adapters.transfer import stall_timeout
from keepstep_agent.adapters.transfer.receiving import download
from keepstep_agent.adapters.transfer.stall_timeout import StallTimeout
from keepstep_agent.adapters.transfer.tls_connector import use_own_tls
from keepstep_agent.adapters.transfer.upload_body import BufferPool
from keepstep_agent.core.settings.values import MIB, StoreSettings
from keepstep_agent.ports import StoreCapabilities

Run = Callable[[Coroutine[Any, Any, None]], None]
on_both_loops = pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
over_both = pytest.mark.parametrize("secure", [False, True])


@pytest.mark.parametrize("size_bytes", [1, 4095, 4096, 2 * MIB, 4 * MIB + 1])
@pytest.mark.parametrize("server", ["rclone", "rclone_tls", "filesystem"])
async def test_what_is_written_past_the_page_cache_is_what_was_stored(
    server: str, size_bytes: int, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    settings = StoreSettings(destination=f"file://{tmp_path}/destination")
    if server != "filesystem":
        settings = request.getfixturevalue(f"{server}_bucket").settings()
    path = make_file(tmp_path / "file", size_bytes)
    region = region_of(path)
    async with open_store(settings) as store:
        await store.put_data("a", region, region_checksum(region))
        version = (await store.head("a")).version
        try:
            descriptor = os.open(tmp_path / "into", os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
        except OSError:
            pytest.skip("this filesystem has no O_DIRECT")
        try:
            for offset in range(0, size_bytes, MIB):
                size = min(MIB, size_bytes - offset)
                await store.get_into("a", offset_bytes=offset, size_bytes=size, version=version, descriptor=descriptor)
        finally:
            os.close(descriptor)

    assert (tmp_path / "into").read_bytes() == path.read_bytes()


async def test_reads_that_are_cancelled_in_the_queue_leave_no_descriptor(tmp_path: Path) -> None:
    async with open_store(StoreSettings(destination=f"file://{tmp_path}/destination")) as store:
        await store.put("a", b"x")  # makes the folder
        # Whoever opens a pipe to read waits until somebody opens it to write.
        os.mkfifo(tmp_path / "destination" / "dead")
        into = tmp_path / "into"
        with into.open("wb") as file:
            reading = [
                asyncio.create_task(
                    store.get_into("dead", offset_bytes=0, size_bytes=1, version="", descriptor=file.fileno())
                )
                for _ in range(16)
            ]
            await asyncio.sleep(0)
            for task in reading:
                task.cancel()
            await asyncio.wait(reading, timeout=HANG_SECONDS)
            with (tmp_path / "destination" / "dead").open("r+b", buffering=0):
                await until_open(into, 1)


@pytest.mark.parametrize("server", ["rclone", "rclone_tls"])
def test_uvloop_sends_and_receives_the_same_bytes(server: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    bucket: Bucket = request.getfixturevalue(f"{server}_bucket")
    path = make_file(tmp_path / "file", 20 * MIB + 3)

    async def there_and_back() -> None:
        region = region_of(path)
        async with open_store(bucket.settings()) as store:
            await store.put_data("a", region, region_checksum(region))
            version = (await store.head("a")).version
            descriptor = os.open(tmp_path / "into", os.O_WRONLY | os.O_CREAT)
            try:
                await store.get_into(
                    "a", offset_bytes=0, size_bytes=region.size_bytes, version=version, descriptor=descriptor
                )
            finally:
                os.close(descriptor)

    uvloop.run(there_and_back())

    assert (tmp_path / "into").read_bytes() == path.read_bytes()


@pytest.mark.parametrize("server", ["rclone", "rclone_tls"])
async def test_memory_does_not_grow_with_the_size_of_a_part(
    server: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    bucket: Bucket = request.getfixturevalue(f"{server}_bucket")
    region = region_of(make_file(tmp_path / "file", 48 * MIB))
    checksum = region_checksum(region)
    async with open_store(bucket.settings()) as store:
        await store.put("warm", b"up")
        tracemalloc.start()
        try:
            await store.put_data("a", region, checksum)
            version = (await store.head("a")).version
            with (tmp_path / "into").open("wb") as into:
                received = await store.get_into(
                    "a", offset_bytes=0, size_bytes=region.size_bytes, version=version, descriptor=into.fileno()
                )
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()

    assert received == checksum
    assert peak_bytes < 10 * MIB


@on_both_loops
@over_both
@pytest.mark.parametrize("integrity", ["sha256", "crc64nvme"])
def test_a_connection_serves_one_part_after_another(
    integrity: str,
    secure: bool,
    run: Run,
    rclone_bucket: Bucket,
    rclone_server: RcloneServer,
    certificate: Certificate,
    tmp_path: Path,
) -> None:
    """A handshake for each part costs as much as sending a megabyte, and over TLS ten."""
    region = region_of(make_file(tmp_path / "file", 3 * MIB + 5))
    checksum = region_checksum(region)
    proxy = FaultProxy(rclone_server.port, certificate=certificate if secure else None)
    proxy.start()

    async def there_and_back() -> None:
        settings = rclone_bucket.settings(
            endpoint_url=proxy.endpoint_url, ca_bundle=str(certificate.certificate) if secure else ""
        )
        async with open_store(settings) as store:
            assert isinstance(store, S3Store)
            store.capabilities = StoreCapabilities(conditional_put=False, integrity=integrity)
            for _ in range(10):
                await store.put_data("a", region, checksum)
                version = (await store.head("a")).version
            with (tmp_path / "into").open("wb") as into:
                for _ in range(10):
                    assert checksum == await store.get_into(
                        "a", offset_bytes=0, size_bytes=region.size_bytes, version=version, descriptor=into.fileno()
                    )

    try:
        run(there_and_back())
        assert proxy.connections == 1
    finally:
        proxy.stop()


class Scripted:
    """A server of HTTP that says to each path what a test wants it to, and no more."""

    def __init__(self, answers: Mapping[str, bytes]) -> None:
        self.connections = 0
        self.url = ""
        self._answers = answers
        self._serving: set[asyncio.Task[None] | None] = set()

    @asynccontextmanager
    async def asked(self, certificate: Certificate | None = None) -> AsyncIterator[aiohttp.ClientSession]:
        """A client that connects as a store's does."""
        offered = trusted = None
        if certificate:
            offered = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            offered.load_cert_chain(certificate.certificate, certificate.key)
            trusted = ssl.create_default_context(cafile=str(certificate.certificate))
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=offered)
        self.url = f"{'https' if certificate else 'http'}://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        connector = aiohttp.TCPConnector(ssl=trusted or False)
        async with asyncio.timeout(HANG_SECONDS), server:
            async with aiohttp.ClientSession(self.url, connector=connector) as client:
                use_own_tls(connector)
                yield client
            await asyncio.gather(*filter(None, self._serving))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._serving.add(asyncio.current_task())
        with suppress(asyncio.IncompleteReadError, OSError):
            answer = b""
            while b"Connection: close" not in answer:
                answer = self._answers[(await reader.readuntil(b"\r\n\r\n")).split()[1].decode()]
                writer.write(answer)
                await writer.drain()
        writer.close()


def answer(body: bytes, *headers: bytes) -> bytes:
    return b"\r\n".join([b"HTTP/1.1 200 OK", b"Content-Length: %d" % len(body), *headers, b"", body])


async def received(client: aiohttp.ClientSession, into: Path, size_bytes: int, stall: StallTimeout) -> int:
    with into.open("wb") as file, ThreadPoolExecutor(1) as executor:
        async with client.get("/part") as response:
            return await download(
                response,
                file.fileno(),
                offset_bytes=0,
                size_bytes=size_bytes,
                buffers=BufferPool(MIB),
                executor=executor,
                stall=stall,
            )


@on_both_loops
@over_both
@pytest.mark.parametrize("more", [b"garbage", answer(b"wrong")], ids=["garbage", "an answer"])
def test_what_comes_after_a_body_is_nobodys_answer(
    more: bytes, secure: bool, run: Run, certificate: Certificate, tmp_path: Path
) -> None:
    body = os.urandom(3 * MIB + 5)
    server = Scripted({"/part": answer(body) + more, "/next": answer(b"right")})

    async def ask() -> None:
        async with server.asked(certificate if secure else None) as client:
            for count in range(1, 5):
                assert await received(client, tmp_path / "into", len(body), StallTimeout(HANG_SECONDS)) == crc64nvme(
                    body
                )
                async with client.get("/next") as response:
                    assert await response.read() == b"right"
                assert server.connections == count + 1

    run(ask())
    assert (tmp_path / "into").read_bytes() == body


@on_both_loops
@over_both
def test_a_server_that_closes_behind_a_body_has_sent_it_whole(
    secure: bool, run: Run, certificate: Certificate, tmp_path: Path
) -> None:
    body = os.urandom(3 * MIB + 5)
    server = Scripted({"/part": answer(body, b"Connection: close")})

    async def ask() -> None:
        async with server.asked(certificate if secure else None) as client:
            for count in range(1, 5):
                assert await received(client, tmp_path / "into", len(body), StallTimeout(HANG_SECONDS)) == crc64nvme(
                    body
                )
                assert server.connections == count

    run(ask())
    assert (tmp_path / "into").read_bytes() == body


SILENCE_SECONDS = 0.5


@pytest.mark.parametrize("size_bytes", [1000, MIB, 8 * MIB])
async def test_a_disk_that_hangs_is_no_silence_of_the_store(
    size_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the store has sent all, or may not send because both buffers are full."""
    body = os.urandom(size_bytes)
    hangs, goes_on = threading.Event(), threading.Event()
    really_write = os.pwrite
    now = 0.0

    def hang(*arguments: Any) -> int:
        hangs.set()
        assert goes_on.wait(HANG_SECONDS)
        return really_write(*arguments)

    async def let_an_hour_pass() -> None:
        nonlocal now
        assert await asyncio.to_thread(hangs.wait, HANG_SECONDS)
        now += 3600.0
        # Meanwhile the time-out looks at that clock.
        await asyncio.sleep(3 * SILENCE_SECONDS)
        goes_on.set()

    monkeypatch.setattr(os, "pwrite", hang)
    # Where only this clock counts, a busy machine is no silence either.
    monkeypatch.setattr(stall_timeout, "time", SimpleNamespace(monotonic=lambda: now))
    async with Scripted({"/part": answer(body)}).asked() as client, asyncio.TaskGroup() as tasks:
        tasks.create_task(let_an_hour_pass())
        async with StallTimeout(SILENCE_SECONDS) as stall:
            assert await received(client, tmp_path / "into", size_bytes, stall) == crc64nvme(body)

    assert (tmp_path / "into").read_bytes() == body


async def test_a_store_that_is_silent_in_the_middle_of_a_body_is_told_from_a_disk_that_hangs(tmp_path: Path) -> None:
    half = answer(os.urandom(8 * MIB))[: 4 * MIB]
    with pytest.raises(TimeoutError):
        async with Scripted({"/part": half}).asked() as client, StallTimeout(SILENCE_SECONDS) as stall:
            await received(client, tmp_path / "into", 8 * MIB, stall)

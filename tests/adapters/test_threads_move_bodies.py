"""How bodies move without the event loop: one thread has a connection as long as a body is on it, and no longer."""

import asyncio
import selectors
import ssl
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from tests.harness.bounds import HANG_SECONDS
from tests.regions import make_file, region_of
from tests.servers.server import ENVIRONMENT, Bucket
from tests.servers.tls import Certificate

from keepstep_agent.adapters.checksum import region_checksum
from keepstep_agent.adapters.open_store import open_store
from keepstep_agent.adapters.rate_limit import RateLimiter
from keepstep_agent.adapters.region_file import RegionFile
from keepstep_agent.adapters.s3.store import S3Store
from keepstep_agent.adapters.transfer import receiving, socket_writers
from keepstep_agent.adapters.transfer.thread_sockets import wait_until_ready
from keepstep_agent.core.settings.values import MIB, StoreSettings
from keepstep_agent.ports import StoreCapabilities

MANY = 48 * MIB
FEW = 12 * MIB
"""More than a socket holds, too."""
MORE_TURNS = 12
"""That a request may take by chance: when an answer comes in two packets, or a clock runs out."""


class CountingSelector(selectors.DefaultSelector):
    """Counts the turns of the event loop that waits with it."""

    turns = 0

    def select(self, timeout: float | None = None) -> Any:
        self.turns += 1
        return super().select(timeout)


@pytest.mark.parametrize("integrity", ["sha256", "crc64nvme"])
@pytest.mark.parametrize("server", ["rclone", "rclone_tls"])
def test_a_body_of_any_size_takes_the_event_loop_the_same_few_turns(
    server: str, integrity: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """With a turn for each socketful, the event loop would limit what an agent moves."""
    bucket: Bucket = request.getfixturevalue(f"{server}_bucket")
    regions = {size: region_of(make_file(tmp_path / f"{size}", size)) for size in (FEW, MANY)}
    checksums = {size: region_checksum(region) for size, region in regions.items()}
    selector = CountingSelector()
    turns: dict[str, dict[int, int]] = {"sent": {}, "received": {}}

    async def there_and_back() -> None:
        async with open_store(bucket.settings()) as store:
            assert isinstance(store, S3Store)
            store.capabilities = StoreCapabilities(conditional_put=False, integrity=integrity)
            await store.put("warm", b"up")
            for size, region in regions.items():
                began = selector.turns
                await store.put_data(f"{size}", region, checksums[size])
                turns["sent"][size] = selector.turns - began
                version = (await store.head(f"{size}")).version
                with (tmp_path / "into").open("wb") as into:
                    began = selector.turns
                    found = await store.get_into(
                        f"{size}", offset_bytes=0, size_bytes=size, version=version, descriptor=into.fileno()
                    )
                    turns["received"][size] = selector.turns - began
                assert found == checksums[size]

    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector)) as runner:
        runner.run(there_and_back())

    for way, found in turns.items():
        assert found[MANY] <= found[FEW] + MORE_TURNS, f"{way}: {found}"


class Hanging:
    """A store that falls silent in the middle of the first body, and serves every later one."""

    def __init__(self, content: bytes) -> None:
        self.url = ""
        self._content = content
        self._asked = 0
        self._over = asyncio.Event()
        self._connections: list[asyncio.Task[None] | None] = []

    @asynccontextmanager
    async def serving(self, certificate: Certificate | None) -> AsyncIterator[S3Store]:
        """Its client has one connection, and so one thread for bodies."""
        offered = None
        if certificate:
            offered = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            offered.load_cert_chain(certificate.certificate, certificate.key)
        async with (
            asyncio.timeout(HANG_SECONDS),
            await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=offered, limit=MIB) as server,
        ):
            port = server.sockets[0].getsockname()[1]
            settings = StoreSettings(
                destination="s3://bucket/prefix",
                endpoint_url=f"{'https' if certificate else 'http'}://127.0.0.1:{port}",
                ca_bundle=str(certificate.certificate) if certificate else "",
                max_connections=1,
            )
            async with open_store(settings) as store:
                assert isinstance(store, S3Store)
                store.capabilities = StoreCapabilities(conditional_put=False, integrity="crc64nvme")
                yield store
            self._over.set()
            await asyncio.gather(*filter(None, self._connections))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.append(asyncio.current_task())
        with suppress(OSError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            self._asked += 1
            if head.startswith(b"put"):
                writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                if self._asked == 1:
                    await self._over.wait()
                left = int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
                while left:
                    left -= len(await reader.readexactly(min(left, MIB)))
                writer.write(b'HTTP/1.1 200 OK\r\nETag: "v"\r\nContent-Length: 0\r\n\r\n')
            else:
                size = len(self._content)
                span = b"Content-Range: bytes 0-%d/%d\r\nContent-Length: %d" % (size - 1, size, size)
                writer.write(b'HTTP/1.1 206 Partial Content\r\nETag: "v"\r\n' + span + b"\r\n\r\n")
                writer.write(self._content[: size // 2])
                if self._asked == 1:
                    await self._over.wait()
                writer.write(self._content[size // 2 :])
            await writer.drain()
        writer.close()


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set once a thread waits for its connection. The environment has credentials."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    waits = threading.Event()

    def tell(*arguments: Any) -> int:
        waits.set()
        return wait_until_ready(*arguments)

    monkeypatch.setattr(socket_writers, "wait_until_ready", tell)
    monkeypatch.setattr(receiving, "wait_until_ready", tell)
    return waits


@pytest.mark.parametrize("secure", [False, True])
async def test_an_upload_cancelled_while_its_store_takes_nothing_gives_its_thread_back(
    secure: bool, certificate: Certificate, tmp_path: Path, waiting: threading.Event
) -> None:
    region = region_of(make_file(tmp_path / "file", MANY))
    checksum = region_checksum(region)
    async with Hanging(b"").serving(certificate if secure else None) as store:
        sending = asyncio.create_task(store.put_data("a", region, checksum))
        assert await asyncio.to_thread(waiting.wait, HANG_SECONDS)
        sending.cancel()
        await asyncio.wait({sending})
        assert sending.cancelled()
        await store.put_data("a", region, checksum)


@pytest.mark.parametrize("secure", [False, True])
async def test_a_download_cancelled_while_its_store_is_silent_gives_its_thread_back(
    secure: bool, certificate: Certificate, tmp_path: Path, waiting: threading.Event
) -> None:
    path = make_file(tmp_path / "file", FEW)
    region = region_of(path)
    with (tmp_path / "into").open("wb") as into:
        async with Hanging(path.read_bytes()).serving(certificate if secure else None) as store:

            def receive() -> Any:
                return store.get_into("a", offset_bytes=0, size_bytes=FEW, version="v", descriptor=into.fileno())

            receiving_task = asyncio.create_task(receive())
            assert await asyncio.to_thread(waiting.wait, HANG_SECONDS)
            receiving_task.cancel()
            await asyncio.wait({receiving_task})
            assert receiving_task.cancelled()
            assert await receive() == region_checksum(region)
    assert (tmp_path / "into").read_bytes() == path.read_bytes()


@pytest.mark.parametrize("server", ["rclone", "rclone_tls"])
async def test_a_cap_that_comes_while_a_body_is_sent_holds_for_the_rest_of_it(
    server: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket: Bucket = request.getfixturevalue(f"{server}_bucket")
    region = region_of(make_file(tmp_path / "file", MANY))
    now = 0.0

    async def wait(_: asyncio.Event, seconds: float) -> None:
        nonlocal now
        now += seconds

    limiter = RateLimiter(0, clock=lambda: now, wait=wait)
    really_read = RegionFile.send if server == "rclone" else RegionFile.read_into

    def cap(*arguments: Any) -> Any:
        limiter.set_rate(8 * MIB)
        return really_read(*arguments)

    async with open_store(bucket.settings(), limiter=limiter) as store:
        assert isinstance(store, S3Store)
        store.capabilities = StoreCapabilities(conditional_put=False, integrity="crc64nvme")
        checksum = region_checksum(region)
        monkeypatch.setattr(RegionFile, really_read.__name__, cap)
        await store.put_data("a", region, checksum)

    # At least half of it came after the cap.
    assert now > MANY / 2 / (8 * MIB)

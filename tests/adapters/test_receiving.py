"""How an object's bytes arrive, and come back as they left: over HTTP and TLS, on either event loop."""

import asyncio
import os
import tracemalloc
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop
from tests.harness.open_files import until_open
from tests.regions import make_file, region_of
from tests.servers.fault_proxy import FaultProxy
from tests.servers.rclone import RcloneServer
from tests.servers.server import Bucket
from tests.servers.tls import Certificate

from mooring_agent.adapters.checksum import region_checksum
from mooring_agent.adapters.open_store import open_store
from mooring_agent.core.settings import MIB, StoreSettings
from mooring_agent.ports import StoreCapabilities

WAIT_SECONDS = 60.0


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
        await store.put_region("a", region, region_checksum(region))
        etag = (await store.head("a")).etag
        try:
            descriptor = os.open(tmp_path / "into", os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
        except OSError:
            pytest.skip("this filesystem has no O_DIRECT")
        try:
            for offset in range(0, size_bytes, MIB):
                size = min(MIB, size_bytes - offset)
                await store.get_into("a", offset_bytes=offset, size_bytes=size, etag=etag, descriptor=descriptor)
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
                    store.get_into("dead", offset_bytes=0, size_bytes=1, etag="", descriptor=file.fileno())
                )
                for _ in range(16)
            ]
            await asyncio.sleep(0)
            for task in reading:
                task.cancel()
            await asyncio.wait(reading, timeout=WAIT_SECONDS)
            with (tmp_path / "destination" / "dead").open("r+b", buffering=0):
                await until_open(into, 1)


@pytest.mark.parametrize("server", ["rclone", "rclone_tls"])
def test_uvloop_sends_and_receives_the_same_bytes(server: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    bucket: Bucket = request.getfixturevalue(f"{server}_bucket")
    path = make_file(tmp_path / "file", 20 * MIB + 3)

    async def there_and_back() -> None:
        region = region_of(path)
        async with open_store(bucket.settings()) as store:
            await store.put_region("a", region, region_checksum(region))
            etag = (await store.head("a")).etag
            descriptor = os.open(tmp_path / "into", os.O_WRONLY | os.O_CREAT)
            try:
                await store.get_into(
                    "a", offset_bytes=0, size_bytes=region.size_bytes, etag=etag, descriptor=descriptor
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
            await store.put_region("a", region, checksum)
            etag = (await store.head("a")).etag
            with (tmp_path / "into").open("wb") as into:
                received = await store.get_into(
                    "a", offset_bytes=0, size_bytes=region.size_bytes, etag=etag, descriptor=into.fileno()
                )
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()

    assert received == checksum
    assert peak_bytes < 10 * MIB


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("integrity", ["sha256", "crc64nvme"])
def test_a_connection_serves_one_part_after_another(
    integrity: str,
    secure: bool,
    run: Callable[[Coroutine[Any, Any, None]], None],
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
            store.capabilities = StoreCapabilities(conditional_put=False, integrity=integrity)
            for _ in range(10):
                etag = await store.put_region("a", region, checksum)
            with (tmp_path / "into").open("wb") as into:
                for _ in range(10):
                    assert checksum == await store.get_into(
                        "a", offset_bytes=0, size_bytes=region.size_bytes, etag=etag, descriptor=into.fileno()
                    )

    try:
        run(there_and_back())
        assert proxy.connections == 1
    finally:
        proxy.stop()

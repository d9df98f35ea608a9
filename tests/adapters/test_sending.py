"""How a file's bytes leave: verified, bounded by the cap, and closed behind whoever is cancelled."""

import asyncio
import errno
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.harness.bounds import HANG_SECONDS
from tests.harness.open_files import until_open
from tests.lanes import nightly
from tests.regions import make_file, region_of, rewrite, touch, truncate
from tests.servers.fault_proxy import FaultProxy
from tests.servers.faults import Fault, Rule
from tests.servers.server import Bucket

from keepstep_agent.adapters.checksum import crc64nvme, region_checksum
from keepstep_agent.adapters.open_store import open_store
from keepstep_agent.adapters.rate_limit import RateLimiter
from keepstep_agent.adapters.region_file import RegionFile
from keepstep_agent.adapters.s3.store import S3Store
from keepstep_agent.adapters.transfer import stall_timeout
from keepstep_agent.adapters.transfer.upload_body import PIECE_BYTES, BufferPool, FileBody
from keepstep_agent.core.errors import ErrorKind, StoreError, VolumeError
from keepstep_agent.core.model import Region
from keepstep_agent.core.settings.values import MIB, StoreSettings
from keepstep_agent.ports import StoreCapabilities


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as executor:
        yield executor


def body_of(region: Region, executor: ThreadPoolExecutor, limiter: RateLimiter | None = None) -> FileBody:
    checksum = region_checksum(region)
    file = RegionFile(region)
    file.open()
    return FileBody(
        file,
        region,
        checksum,
        buffers=BufferPool(PIECE_BYTES),
        executor=executor,
        limiter=limiter or RateLimiter(),
    )


@pytest.mark.parametrize("change", [truncate, rewrite, touch])
async def test_a_file_that_changes_while_it_is_sent_never_gives_its_last_piece(
    change: Callable[[Path], None], tmp_path: Path, executor: ThreadPoolExecutor
) -> None:
    path = make_file(tmp_path / "file", 3 * PIECE_BYTES)
    body = body_of(region_of(path), executor)
    pieces = body.pieces()
    received = [bytes(await anext(pieces))]
    change(path)

    with pytest.raises(VolumeError) as caught:
        await _gather(pieces, received)

    assert caught.value.kind is ErrorKind.FILE_CHANGED
    assert body.failure is caught.value
    assert sum(map(len, received)) < 3 * PIECE_BYTES


async def test_a_file_that_is_renamed_over_or_unlinked_is_still_sent_whole(
    tmp_path: Path, executor: ThreadPoolExecutor
) -> None:
    path = make_file(tmp_path / "file", 3 * PIECE_BYTES)
    content = path.read_bytes()
    body = body_of(region_of(path), executor)
    pieces = body.pieces()
    received = bytes(await anext(pieces))
    make_file(tmp_path / "new", 100).replace(path)

    received += b"".join([bytes(piece) async for piece in pieces])

    assert received == content


@pytest.mark.parametrize("change", [truncate, rewrite, touch])
@pytest.mark.parametrize("server", ["rclone", "rclone_tls", *nightly("ceph"), "verifying"])
async def test_a_file_that_changes_on_its_way_to_a_store_is_not_stored(
    server: str, change: Callable[[Path], None], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    bucket: Bucket = request.getfixturevalue(f"{server}_bucket")
    path = make_file(tmp_path / "file", 8 * MIB)
    region = region_of(path)
    checksum = region_checksum(region)
    limiter = RateLimiter(1)
    async with open_store(bucket.settings(), limiter=limiter) as store:
        await store.probe()
        sending = asyncio.create_task(store.put_data("a", region, checksum))
        async with asyncio.timeout(HANG_SECONDS):
            await _until_limited(limiter)
        change(path)
        limiter.set_rate(0)

        with pytest.raises(VolumeError) as caught:
            await sending

        assert caught.value.kind is ErrorKind.FILE_CHANGED
        assert [info.key async for info in store.list("") if "rclone_temp" not in info.key] == []


async def test_a_file_that_is_rewritten_in_secret_before_the_second_of_two_checksums_is_not_stored(
    rclone_bucket: Bucket, tmp_path: Path
) -> None:
    """A store that checks only CRC32C is told it of bytes that the manifest's CRC64NVME covers, or of none."""
    path = make_file(tmp_path / "file", MIB)
    region = region_of(path)
    checksum = region_checksum(region)
    with path.open("r+b") as file:
        file.write(b"secret")
    os.utime(path, ns=(0, region.fingerprint.mtime_ns))
    async with open_store(rclone_bucket.settings()) as store:
        assert isinstance(store, S3Store)
        store.capabilities = StoreCapabilities(conditional_put=False, integrity="crc32c")

        with pytest.raises(VolumeError) as caught:
            await store.put_data("a", region, checksum)

        assert caught.value.kind is ErrorKind.FILE_CHANGED
        assert [info.key async for info in store.list("")] == []


async def test_where_the_kernel_sends_no_such_file_its_bytes_arrive_all_the_same(
    verifying_bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_file(tmp_path / "file", 20 * MIB + 3)
    region = region_of(path)
    really_send, calls = os.sendfile, iter(range(100))

    def refuse_later(*arguments: int) -> int:
        if next(calls) < 2:
            return really_send(*arguments)
        raise OSError(errno.EINVAL, "no splice here")

    monkeypatch.setattr(os, "sendfile", refuse_later)
    async with open_store(verifying_bucket.settings()) as store:
        assert (await store.probe()).integrity == "crc64nvme"
        await store.put_data("a", region, region_checksum(region))

        assert (await store.get("a", limit_bytes=region.size_bytes)) == path.read_bytes()
    assert next(calls) > 2


@pytest.mark.parametrize("integrity", ["sha256", "crc64nvme"])
async def test_an_answer_that_comes_before_the_body_is_not_believed(
    integrity: str, rclone_bucket: Bucket, fault_proxy: FaultProxy, tmp_path: Path
) -> None:
    region = region_of(make_file(tmp_path / "file", 16 * MIB))
    async with open_store(rclone_bucket.settings(endpoint_url=fault_proxy.endpoint_url)) as store:
        assert isinstance(store, S3Store)
        store.capabilities = StoreCapabilities(conditional_put=False, integrity=integrity)
        fault_proxy.add(Rule(name="early", fault=Fault.EARLY_SUCCESS, method="PUT"))

        with pytest.raises(StoreError) as caught:
            await store.put_data("a", region, region_checksum(region))

        assert caught.value.kind is ErrorKind.STORE_FAILED
        assert fault_proxy.hits("early") == 1


@pytest.mark.nightly
async def test_a_disk_that_is_slower_than_the_wire_is_no_silence(
    verifying_bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the kernel sends of it at a time takes less than the store's time-out, all of it more."""
    region = region_of(make_file(tmp_path / "file", 80 * MIB))
    really_send = os.sendfile
    stall_seconds, now = 0.5, 0.0

    def send_slowly(connection: int, file: int, offset: int, size: int) -> int:
        nonlocal now
        now += 0.9 * stall_seconds
        # So that the time-out looks meanwhile.
        time.sleep(0.02)
        return really_send(connection, file, offset, min(size, MIB))

    async with open_store(verifying_bucket.settings()) as store:
        assert isinstance(store, S3Store)
        await store.probe()
        store._stall_seconds = stall_seconds
        # Where only this clock counts, a busy machine is no silence either.
        monkeypatch.setattr(stall_timeout, "time", SimpleNamespace(monotonic=lambda: now))
        monkeypatch.setattr(os, "sendfile", send_slowly)

        await store.put_data("a", region, region_checksum(region))

    assert now > 10 * stall_seconds


@pytest.mark.parametrize("server", ["rclone", "rclone_tls", "verifying"])
async def test_a_file_that_is_rewritten_in_secret_on_its_way_is_not_stored(
    server: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """As through a mapping: neither its size nor its times tell. What the kernel sends, the store refuses."""
    bucket: Bucket = request.getfixturevalue(f"{server}_bucket")
    path = make_file(tmp_path / "file", 8 * MIB)
    region = region_of(path)
    limiter = RateLimiter(1)
    async with open_store(bucket.settings(), limiter=limiter) as store:
        await store.probe()
        sending = asyncio.create_task(store.put_data("a", region, region_checksum(region)))
        async with asyncio.timeout(HANG_SECONDS):
            await _until_limited(limiter)
        before = path.stat()
        with path.open("r+b") as file:
            file.seek(4 * MIB)
            file.write(b"secret")
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        limiter.set_rate(0)

        with pytest.raises(VolumeError) as caught:
            await sending

        assert caught.value.kind is ErrorKind.FILE_CHANGED
        assert [info.key async for info in store.list("") if "rclone_temp" not in info.key] == []


@pytest.mark.parametrize(("server", "opened_before"), [("filesystem", 0), ("rclone", 1)])
async def test_an_upload_that_is_cancelled_while_its_file_is_being_opened_leaves_it_closed(
    server: str,
    opened_before: int,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is open keeps its blocks on a volume after it was deleted. For S3 the file is hashed before it is sent."""
    settings = StoreSettings(destination=f"file://{tmp_path}/destination")
    if server != "filesystem":
        settings = request.getfixturevalue(f"{server}_bucket").settings()
    path = make_file(tmp_path / "file", 100)
    region = region_of(path)
    checksum = region_checksum(region)
    opening, go_on, opened = threading.Event(), threading.Event(), threading.Event()
    opens = iter(range(100))
    really_open = os.open

    def slow_open(name: str, *arguments: int, **options: Any) -> int:
        if name == path.name and next(opens) == opened_before:
            opening.set()
            assert go_on.wait(HANG_SECONDS)
            descriptor = really_open(name, *arguments, **options)
            opened.set()
            return descriptor
        return really_open(name, *arguments, **options)

    monkeypatch.setattr(os, "open", slow_open)
    async with open_store(settings) as store:
        sending = asyncio.create_task(store.put_data("a", region, checksum))
        assert await asyncio.to_thread(opening.wait, HANG_SECONDS)
        sending.cancel()
        await asyncio.sleep(0)
        go_on.set()
        await asyncio.wait({sending}, timeout=HANG_SECONDS)
        assert sending.cancelled()
        assert await asyncio.to_thread(opened.wait, HANG_SECONDS)
        await until_open(path, 0)


async def test_uploads_keep_to_the_cap(tmp_path: Path) -> None:
    region = region_of(make_file(tmp_path / "file", 8 * MIB))
    settings = StoreSettings(destination=f"file://{tmp_path}/destination")
    now = 0.0

    async def wait(_: asyncio.Event, seconds: float) -> None:
        nonlocal now
        now += seconds

    async with open_store(settings, limiter=RateLimiter(8 * MIB, clock=lambda: now, wait=wait)) as store:
        await store.put_data("a", region, region_checksum(region))
        await store.put_data("b", region, region_checksum(region))

    assert now == pytest.approx(2.0, abs=0.1)


@pytest.mark.parametrize("server", ["filesystem", "rclone"])
async def test_bytes_in_memory_keep_to_the_cap_too(server: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    settings = StoreSettings(destination=f"file://{tmp_path}/destination")
    if server != "filesystem":
        settings = request.getfixturevalue(f"{server}_bucket").settings()
    body = bytearray(4 * MIB)
    now = 0.0

    async def wait(_: asyncio.Event, seconds: float) -> None:
        nonlocal now
        now += seconds

    async with open_store(settings, limiter=RateLimiter(MIB, clock=lambda: now, wait=wait)) as store:
        for key in ("a", "b", "c"):
            await store.put_data(key, body, crc64nvme(body))

    # What the last put has taken is paid for by the next.
    assert 7.5 <= now <= 12.1


async def _gather(pieces: AsyncIterator[memoryview], into: list[bytes]) -> None:
    async for piece in pieces:
        into.append(bytes(piece))


async def _until_limited(limiter: RateLimiter) -> None:
    """Until the first piece is paid for: the request is under way and the second piece waits."""
    while limiter.bytes_owed == 0:  # noqa: ASYNC110 - a limiter tells nobody
        await asyncio.sleep(0.005)

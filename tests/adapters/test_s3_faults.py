"""A real S3 server behind a proxy that breaks things, and one that is told the wrong things."""

import asyncio
import datetime
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import botocore.auth
import pytest
from tests.harness.open_files import open_files
from tests.harness.plain_transfer import PlainTransfer
from tests.regions import make_file, region_of
from tests.servers.ceph import CephServer
from tests.servers.fault_proxy import Fault, FaultProxy, Rule
from tests.servers.process import free_port, wait_until
from tests.servers.rclone import RcloneServer
from tests.servers.seaweedfs import SeaweedServer
from tests.servers.server import SECRET_KEY, Bucket
from tests.servers.tls import Certificate

import mooring_agent
from mooring_agent.adapters.checksum import crc64nvme, region_checksum
from mooring_agent.adapters.open_store import open_store
from mooring_agent.adapters.rate_limit import RateLimiter
from mooring_agent.adapters.s3.store import open_s3_store
from mooring_agent.adapters.transfer.direct import DirectTransfer
from mooring_agent.core.errors import ErrorKind, StoreError
from mooring_agent.core.model import Region
from mooring_agent.core.settings.values import MIB, StoreSettings
from mooring_agent.ports import ObjectStore

WAIT_SECONDS = 60.0

NGINX_NOT_FOUND = (
    b"<html>\r\n<head><title>404 Not Found</title></head>\r\n<body>\r\n"
    b"<center><h1>404 Not Found</h1></center>\r\n<hr><center>nginx</center>\r\n</body>\r\n</html>\r\n"
)


@pytest.fixture(params=["pieces", "kernel", "tls", "plain"])
def way(request: pytest.FixtureRequest) -> str:
    """How bytes move: summed up again as they leave, by the kernel, encrypted, or as plain bytes, the reference."""
    return str(request.param)


@pytest.fixture
def fault_proxy(
    request: pytest.FixtureRequest, rclone_server: RcloneServer, certificate: Certificate
) -> Iterator[FaultProxy]:
    tls = "way" in request.fixturenames and request.getfixturevalue("way") == "tls"
    proxy = FaultProxy(rclone_server.port, certificate=certificate if tls else None)
    proxy.start()
    yield proxy
    proxy.stop()


@asynccontextmanager
async def open_way(way: str, settings: StoreSettings) -> AsyncIterator[ObjectStore]:
    store = await open_s3_store(settings, RateLimiter(), PlainTransfer if way == "plain" else DirectTransfer)
    if way == "kernel":
        # As after a probe of a store that checks; whether this one does is of no matter to what breaks here.
        store.capabilities = replace(store.capabilities, integrity="crc64nvme")
    try:
        yield store
    finally:
        await store.close()


@pytest.fixture
def proxied(rclone_bucket: Bucket, fault_proxy: FaultProxy, certificate: Certificate) -> Bucket:
    ca_bundle = certificate.certificate if fault_proxy.endpoint_url.startswith("https") else None
    return replace(rclone_bucket, endpoint_url=fault_proxy.endpoint_url, ca_bundle=ca_bundle)


@pytest.fixture
async def store(way: str, proxied: Bucket) -> AsyncIterator[ObjectStore]:
    async with open_way(way, proxied.settings()) as store:
        yield store


@pytest.fixture
async def impatient_store(way: str, proxied: Bucket) -> AsyncIterator[ObjectStore]:
    """Only for what never answers: a busy machine takes longer than this over what does."""
    async with open_way(way, proxied.settings(connect_timeout_seconds=0.5, read_timeout_seconds=0.5)) as store:
        yield store


@pytest.fixture
def region(tmp_path: Path) -> Region:
    return region_of(make_file(tmp_path / "file", 4 * MIB))


@pytest.fixture
def second_proxy(fault_proxy: FaultProxy) -> Iterator[FaultProxy]:
    proxy = FaultProxy(fault_proxy.port)
    proxy.start()
    yield proxy
    proxy.stop()


async def fails(kind: ErrorKind, awaitable: Awaitable[object]) -> StoreError:
    with pytest.raises(StoreError) as caught:
        await awaitable
    assert caught.value.kind is kind, caught.value
    return caught.value


@pytest.mark.parametrize("server", ["rclone", "seaweed", "ceph"])
async def test_a_wrong_access_key_is_denied(
    server: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket: Bucket = request.getfixturevalue(f"{server}_bucket")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody-knows-this")
    async with open_store(bucket.settings()) as store:
        error = await fails(ErrorKind.ACCESS_DENIED, store.put("a", b"x"))

    assert bucket.name in str(error)
    assert "access key id" in error.hint


@pytest.mark.parametrize("server", ["rclone", "seaweed", "ceph"])
async def test_a_wrong_secret_is_denied_and_no_secret_is_told(
    server: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket: Bucket = request.getfixturevalue(f"{server}_bucket")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-secret-value")
    async with open_store(bucket.settings()) as store:
        error = await fails(ErrorKind.ACCESS_DENIED, store.put("a", b"x"))

    assert "wrong-secret-value" not in f"{error} {error.hint}"
    assert SECRET_KEY not in f"{error} {error.hint}"
    assert "secret access key is wrong" in error.hint


async def test_no_credentials_at_all_are_denied_with_a_way_out(
    rclone_bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    async with open_store(rclone_bucket.settings()) as store:
        error = await fails(ErrorKind.ACCESS_DENIED, store.put("a", b"x"))

    assert "AWS_ACCESS_KEY_ID" in error.hint


@pytest.mark.parametrize("server", ["rclone", "moto", "seaweed", "ceph"])
async def test_a_missing_bucket_is_missing_for_every_operation(server: str, request: pytest.FixtureRequest) -> None:
    bucket: Bucket = request.getfixturevalue(f"{server}_bucket")
    settings = bucket.settings(destination="s3://there-is-no-such-bucket/run")
    async with open_store(settings) as store:
        for operation in (store.put("a", b"x"), store.head("a"), store.get("a", limit_bytes=1), _first(store)):
            await fails(ErrorKind.BUCKET_MISSING, operation)


async def test_a_dead_endpoint_is_unreachable(rclone_bucket: Bucket) -> None:
    async with open_store(rclone_bucket.settings(endpoint_url=f"http://127.0.0.1:{free_port()}")) as store:
        await fails(ErrorKind.UNREACHABLE, store.put("a", b"x"))


async def test_an_unknown_host_is_unreachable(rclone_bucket: Bucket) -> None:
    # Longer than a resolver tries that is told nothing: its word is asked for, not how soon it comes.
    settings = rclone_bucket.settings(endpoint_url="http://store.invalid", connect_timeout_seconds=WAIT_SECONDS)
    async with open_store(settings) as store:
        await fails(ErrorKind.UNREACHABLE, store.put("a", b"x"))


async def test_an_unknown_certificate_authority_is_named(rclone_tls_bucket: Bucket) -> None:
    async with open_store(rclone_tls_bucket.settings(ca_bundle="")) as store:
        error = await fails(ErrorKind.UNREACHABLE, store.put("a", b"x"))

    assert "CA bundle" in error.hint


async def test_an_unverified_certificate_is_accepted_when_asked_for(rclone_tls_bucket: Bucket) -> None:
    async with open_store(rclone_tls_bucket.settings(ca_bundle="", verify_tls=False)) as store:
        await store.put("a", b"x")


async def test_a_skewed_clock_has_its_own_kind(ceph_bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    def an_hour_late(remove_tzinfo: bool = True) -> datetime.datetime:
        now = datetime.datetime.now(datetime.UTC) - datetime.timedelta(hours=1)
        return now.replace(tzinfo=None) if remove_tzinfo else now

    monkeypatch.setattr(botocore.auth, "get_current_datetime", an_hour_late)
    async with open_store(ceph_bucket.settings()) as store:
        error = await fails(ErrorKind.CLOCK_SKEWED, store.put("a", b"x"))

    assert "clock" in error.hint


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (503, "SlowDown", ErrorKind.THROTTLED),
        (429, "TooManyRequests", ErrorKind.THROTTLED),
        (500, "InternalError", ErrorKind.STORE_FAILED),
        (400, "BadDigest", ErrorKind.CORRUPTED_IN_TRANSIT),
        (200, "InternalError", ErrorKind.STORE_FAILED),
    ],
)
async def test_an_error_of_the_store_is_told_once_and_not_retried(
    store: ObjectStore, fault_proxy: FaultProxy, region: Region, status: int, code: str, kind: ErrorKind
) -> None:
    upload = await store.create_upload("big")
    receipt = await store.put_part("big", upload, 1, region, region_checksum(region))
    body = f"<Error><Code>{code}</Code><Message>no</Message></Error>".encode()
    fault_proxy.add(Rule(name="no", fault=Fault.STATUS, method="POST", times=-1, status=status, body=body))

    await fails(kind, store.complete_upload("big", upload, [receipt]))

    assert fault_proxy.hits("no") == 1


_OPERATIONS: dict[str, Callable[[ObjectStore, Region, str, str], Awaitable[object]]] = {
    "put": lambda store, region, upload, version: store.put("b", b"x"),
    "put a region": lambda store, region, upload, version: store.put_data("b", region, region_checksum(region)),
    "put bytes": lambda store, region, upload, version: store.put_data("b", bytearray(b"x"), crc64nvme(b"x")),
    "create an upload": lambda store, region, upload, version: store.create_upload("b"),
    "put a part": lambda store, region, upload, version: store.put_part(
        "up", upload, 2, region, region_checksum(region)
    ),
    "list parts": lambda store, region, upload, version: store.list_parts("up", upload),
    "abort": lambda store, region, upload, version: store.abort_upload("up", upload),
    "list uploads": lambda store, region, upload, version: _first_upload(store),
    "get": lambda store, region, upload, version: store.get("a", limit_bytes=9),
    "get into": lambda store, region, upload, version: _get_into(store, "a", 1, version),
    "list": lambda store, region, upload, version: _first(store),
    "delete": lambda store, region, upload, version: store.delete("a"),
    "probe": lambda store, region, upload, version: store.probe(),
}
"""How to call each operation with an object `a` of one byte with that ETag, and an upload of `up` in progress."""


@pytest.mark.parametrize(
    ("operation", "body"),
    [
        *((operation, NGINX_NOT_FOUND) for operation in _OPERATIONS),
        ("get", b"404 page not found"),  # Traefik's
        ("get", b""),
    ],
)
async def test_a_404_of_a_gateway_is_a_failure_that_passes(
    store: ObjectStore, fault_proxy: FaultProxy, region: Region, operation: str, body: bytes
) -> None:
    await store.put("a", b"x")
    version = (await store.head("a")).version
    upload = await store.create_upload("up")
    call = _OPERATIONS[operation]
    fault_proxy.add(Rule(name="gateway", fault=Fault.STATUS, status=404, body=body))

    error = await fails(ErrorKind.STORE_FAILED, call(store, region, upload, version))

    assert "gateway" in error.hint
    assert (await store.head("a")).version == version
    assert await store.list_parts("up", upload) == []
    await call(store, region, upload, version)


async def test_a_404_of_a_gateway_to_the_last_request_of_an_upload_leaves_the_upload_as_it_was(
    store: ObjectStore, fault_proxy: FaultProxy, region: Region
) -> None:
    upload = await store.create_upload("up")
    receipt = await store.put_part("up", upload, 1, region, region_checksum(region))
    fault_proxy.add(Rule(name="gateway", fault=Fault.STATUS, status=404, body=NGINX_NOT_FOUND))

    await fails(ErrorKind.STORE_FAILED, store.complete_upload("up", upload, [receipt]))
    await store.complete_upload("up", upload, [receipt])

    assert (await store.head("up")).size_bytes == region.size_bytes


async def test_a_page_instead_of_a_listing_is_no_empty_listing(store: ObjectStore, fault_proxy: FaultProxy) -> None:
    await store.put("a", b"x")
    page = b"<html><body>Please sign in.</body></html>"
    fault_proxy.add(Rule(name="page", fault=Fault.STATUS, method="GET", status=200, body=page))

    await fails(ErrorKind.STORE_FAILED, _first(store))


async def test_a_page_in_answer_to_a_write_is_no_success(
    store: ObjectStore, fault_proxy: FaultProxy, tmp_path: Path
) -> None:
    region = region_of(make_file(tmp_path / "file", 1000))
    upload = await store.create_upload("up")
    page = b"<html><body>Please sign in.</body></html>"
    fault_proxy.add(Rule(name="page", fault=Fault.STATUS, method="PUT", status=200, body=page, times=-1))

    await fails(ErrorKind.STORE_FAILED, store.put("a", b"x"))
    await fails(ErrorKind.STORE_FAILED, store.put_data("a", region, region_checksum(region)))
    await fails(ErrorKind.STORE_FAILED, store.put_part("up", upload, 1, region, region_checksum(region)))


async def test_a_404_to_a_head_is_believed_only_when_the_store_itself_says_what_is_missing(
    store: ObjectStore, fault_proxy: FaultProxy
) -> None:
    await store.put("a", b"x")
    await store.put("empty", b"")
    fault_proxy.add(Rule(name="head", fault=Fault.STATUS, method="HEAD", status=404, times=-1))

    assert (await store.head("a")).size_bytes == 1
    assert (await store.head("empty")).size_bytes == 0
    await fails(ErrorKind.NOT_FOUND, store.head("b"))
    fault_proxy.add(Rule(name="all", fault=Fault.STATUS, status=404, body=NGINX_NOT_FOUND, times=-1))
    await fails(ErrorKind.STORE_FAILED, store.head("b"))


@pytest.mark.parametrize("fault", [Fault.RESET_REQUEST, Fault.LOSE_ANSWER])
async def test_a_cut_upload_is_unreachable(
    store: ObjectStore, fault_proxy: FaultProxy, region: Region, fault: Fault
) -> None:
    fault_proxy.add(Rule(name="cut", fault=fault, method="PUT", after_bytes=MIB))

    await fails(ErrorKind.UNREACHABLE, store.put_data("a", region, region_checksum(region)))

    assert [request.rule for request in fault_proxy.log] == ["cut"]


async def test_a_lost_answer_may_hide_a_success(store: ObjectStore, fault_proxy: FaultProxy) -> None:
    fault_proxy.add(Rule(name="lost", fault=Fault.LOSE_ANSWER, method="PUT"))

    await fails(ErrorKind.UNREACHABLE, store.put("a", b"x"))

    assert await store.get("a", limit_bytes=1) == b"x"


async def test_a_duplicated_request_changes_nothing(
    store: ObjectStore, fault_proxy: FaultProxy, region: Region
) -> None:
    fault_proxy.add(Rule(name="twice", fault=Fault.DUPLICATE, method="PUT"))

    await store.put_data("a", region, region_checksum(region))

    assert (await store.head("a")).size_bytes == region.size_bytes


@pytest.mark.parametrize("fault", [Fault.RESET_RESPONSE, Fault.END_RESPONSE])
async def test_a_cut_download_is_unreachable(
    store: ObjectStore, fault_proxy: FaultProxy, region: Region, fault: Fault, tmp_path: Path
) -> None:
    await store.put_data("a", region, region_checksum(region))
    version = (await store.head("a")).version
    fault_proxy.add(Rule(name="cut", fault=fault, method="GET", after_bytes=2 * MIB, times=2))

    with (tmp_path / "into").open("wb") as into:
        await fails(
            ErrorKind.UNREACHABLE,
            store.get_into(
                "a", offset_bytes=0, size_bytes=region.size_bytes, version=version, descriptor=into.fileno()
            ),
        )
    await fails(ErrorKind.UNREACHABLE, store.get("a", limit_bytes=8 * MIB))


async def test_a_flipped_bit_shows_in_the_checksum_of_a_download(
    store: ObjectStore, fault_proxy: FaultProxy, region: Region, tmp_path: Path
) -> None:
    await store.put_data("a", region, region_checksum(region))
    version = (await store.head("a")).version
    fault_proxy.add(Rule(name="flip", fault=Fault.FLIP_RESPONSE, method="GET", after_bytes=3 * MIB + 1))

    with (tmp_path / "into").open("wb") as into:
        checksum = await store.get_into(
            "a", offset_bytes=0, size_bytes=region.size_bytes, version=version, descriptor=into.fileno()
        )

    assert checksum != region_checksum(region)


async def test_a_stalled_request_ends_in_a_bounded_time(
    impatient_store: ObjectStore, fault_proxy: FaultProxy, region: Region
) -> None:
    fault_proxy.add(Rule(name="stall", fault=Fault.BLACKHOLE, method="PUT", after_bytes=100_000, times=2))
    fault_proxy.add(Rule(name="stall", fault=Fault.BLACKHOLE, method="HEAD"))

    async with asyncio.timeout(WAIT_SECONDS):
        await fails(ErrorKind.TIMED_OUT, impatient_store.head("a"))
        await fails(ErrorKind.TIMED_OUT, impatient_store.put_data("a", region, region_checksum(region)))
        await fails(ErrorKind.TIMED_OUT, impatient_store.put("a", b"x" * 200_000))


async def test_an_outage_is_unreachable_and_then_over(store: ObjectStore, fault_proxy: FaultProxy) -> None:
    await store.put("a", b"x")
    fault_proxy.outage(True)
    await fails(ErrorKind.UNREACHABLE, store.head("a"))
    fault_proxy.outage(False)

    assert (await store.head("a")).size_bytes == 1


async def test_a_slow_store_that_goes_on_is_waited_for(
    rclone_bucket: Bucket, fault_proxy: FaultProxy, tmp_path: Path
) -> None:
    region = region_of(make_file(tmp_path / "file", 18 * MIB))
    settings = rclone_bucket.settings(
        endpoint_url=fault_proxy.endpoint_url, connect_timeout_seconds=2.0, read_timeout_seconds=5.0
    )
    fault_proxy.throttle(2 * MIB)  # nine seconds in all: longer than any time-out, but never silent for so long
    async with open_store(settings) as store:
        await store.put_data("a", region, region_checksum(region))

        assert (await store.head("a")).size_bytes == region.size_bytes


async def test_a_cancelled_upload_leaves_no_descriptor_open(
    store: ObjectStore, fault_proxy: FaultProxy, region: Region
) -> None:
    fault_proxy.add(Rule(name="stall", fault=Fault.BLACKHOLE, method="PUT", after_bytes=100_000))
    sending = asyncio.create_task(store.put_data("a", region, region_checksum(region)))
    await asyncio.to_thread(wait_until, lambda: fault_proxy.hits("stall") > 0, "the proxy stalls")

    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending

    assert Path(region.file) not in open_files()


async def test_a_bit_flipped_on_the_way_is_refused_by_a_store_that_checks_the_signed_payload(
    ceph_bucket: Bucket, ceph_server: CephServer, region: Region
) -> None:
    proxy = FaultProxy(ceph_server.port)
    proxy.start()
    try:
        async with open_store(ceph_bucket.settings(endpoint_url=proxy.endpoint_url)) as store:
            assert (await store.probe()).integrity == "sha256"
            proxy.add(Rule(name="flip", fault=Fault.FLIP_REQUEST, method="PUT", after_bytes=MIB))
            await fails(ErrorKind.CORRUPTED_IN_TRANSIT, store.put_data("a", region, region_checksum(region)))
            await fails(ErrorKind.NOT_FOUND, store.head("a"))
            proxy.add(Rule(name="flip", fault=Fault.FLIP_REQUEST, method="PUT", after_bytes=MIB))
            body = bytearray(2 * MIB)
            await fails(ErrorKind.CORRUPTED_IN_TRANSIT, store.put_data("a", body, crc64nvme(body)))
            await fails(ErrorKind.NOT_FOUND, store.head("a"))
    finally:
        proxy.stop()


async def test_a_bit_of_a_small_object_that_was_flipped_on_the_way_is_refused(
    seaweed_bucket: Bucket, seaweed_server: SeaweedServer
) -> None:
    proxy = FaultProxy(seaweed_server.port)
    proxy.start()
    try:
        async with open_store(seaweed_bucket.settings(endpoint_url=proxy.endpoint_url)) as store:
            # It believes the SHA-256 of a signature.
            assert (await store.probe()).integrity == "crc64nvme"
            for condition in (True, False):
                proxy.add(Rule(name="flip", fault=Fault.FLIP_REQUEST, method="PUT", after_bytes=5))
                await fails(ErrorKind.CORRUPTED_IN_TRANSIT, store.put("a", b"0123456789", if_absent=condition))
                await fails(ErrorKind.NOT_FOUND, store.head("a"))
            await store.put("a", b"0123456789", if_absent=True)
    finally:
        proxy.stop()


@pytest.mark.parametrize(("target", "times"), [("", 4), ("partNumber=", 2)], ids=["objects", "parts"])
async def test_bits_that_flip_during_the_probe_hide_no_check_of_the_store(
    seaweed_bucket: Bucket, seaweed_server: SeaweedServer, target: str, times: int
) -> None:
    proxy = FaultProxy(seaweed_server.port)
    proxy.start()
    proxy.add(Rule(name="flip", fault=Fault.FLIP_REQUEST, method="PUT", target=target, after_bytes=5, times=times))
    try:
        async with open_store(seaweed_bucket.settings(endpoint_url=proxy.endpoint_url)) as store:
            assert (await store.probe()).integrity == "crc64nvme"
        assert proxy.hits("flip") == times
    finally:
        proxy.stop()


async def test_a_stores_log_says_who_asked(rclone_bucket: Bucket, fault_proxy: FaultProxy) -> None:
    async with open_store(rclone_bucket.settings(endpoint_url=fault_proxy.endpoint_url)) as store:
        await store.put("a", b"x")

    assert [request.headers["user-agent"].split()[0] for request in fault_proxy.log] == [
        f"mooring/{mooring_agent.__version__}"
    ]


async def test_a_store_that_checks_crc64nvme_gets_unsigned_payloads_and_refuses_a_flipped_bit(
    rclone_bucket: Bucket, fault_proxy: FaultProxy, second_proxy: FaultProxy, region: Region
) -> None:
    fault_proxy.add(Rule(name="check", fault=Fault.CHECK_CRC64NVME, method="PUT", times=-1))
    async with open_store(rclone_bucket.settings(endpoint_url=second_proxy.endpoint_url)) as store:
        assert (await store.probe()).integrity == "crc64nvme"
        upload = await store.create_upload("big")
        await store.put_part("big", upload, 1, region, region_checksum(region))

        sent = [request for request in second_proxy.log if "partNumber" in request.query][-1]
        assert sent.headers["x-amz-content-sha256"] == "UNSIGNED-PAYLOAD"
        assert sent.body_bytes == region.size_bytes
        assert "x-amz-checksum-crc64nvme" in sent.headers["authorization"]

        second_proxy.add(Rule(name="flip", fault=Fault.FLIP_REQUEST, target="partNumber=2", after_bytes=5))
        await fails(
            ErrorKind.CORRUPTED_IN_TRANSIT,
            store.put_part("big", upload, 2, region, region_checksum(region)),
        )
        assert [part.number for part in await store.list_parts("big", upload)] == [1]


async def test_bytes_in_memory_are_declared_like_those_of_a_file(
    rclone_bucket: Bucket, fault_proxy: FaultProxy, second_proxy: FaultProxy
) -> None:
    body = bytearray(range(256)) * 8192
    fault_proxy.add(Rule(name="check", fault=Fault.CHECK_CRC64NVME, method="PUT", times=-1))
    async with open_store(rclone_bucket.settings(endpoint_url=second_proxy.endpoint_url)) as store:
        assert (await store.probe()).integrity == "crc64nvme"
        await store.put_data("a", body, crc64nvme(body))

        sent = [request for request in second_proxy.log if request.path.endswith("/a")][-1]
        assert sent.headers["x-amz-content-sha256"] == "UNSIGNED-PAYLOAD"
        assert "x-amz-checksum-crc64nvme" in sent.headers["authorization"]
        assert sent.body_bytes == len(body)

        second_proxy.add(Rule(name="flip", fault=Fault.FLIP_REQUEST, target="/b", after_bytes=5))
        await fails(ErrorKind.CORRUPTED_IN_TRANSIT, store.put_data("b", body, crc64nvme(body)))
        await fails(ErrorKind.NOT_FOUND, store.head("b"))


async def test_bytes_that_a_server_does_not_read_time_out(
    impatient_store: ObjectStore, fault_proxy: FaultProxy
) -> None:
    body = bytearray(8 * MIB)
    fault_proxy.add(Rule(name="stall", fault=Fault.BLACKHOLE, method="PUT", after_bytes=100_000))
    await fails(ErrorKind.TIMED_OUT, impatient_store.put_data("a", body, crc64nvme(body)))


async def test_a_store_that_refuses_every_checksum_counts_as_not_checking(
    store: ObjectStore, fault_proxy: FaultProxy, way: str
) -> None:
    body = b"<Error><Code>NotImplemented</Code></Error>"
    for method in ("PUT", "POST"):
        fault_proxy.add(Rule(name="no", fault=Fault.STATUS, method=method, times=2, status=501, body=body))

    assert (await store.probe()).integrity == ("none" if way == "tls" else "sha256")


async def test_a_probe_tells_its_first_error_and_not_that_of_the_removal(
    rclone_bucket: Bucket, fault_proxy: FaultProxy
) -> None:
    denied = b"<Error><Code>AccessDenied</Code><Message>no</Message></Error>"
    fault_proxy.add(Rule(name="put", fault=Fault.STATUS, method="PUT", times=-1, status=403, body=denied))
    fault_proxy.add(Rule(name="delete", fault=Fault.STATUS, method="DELETE", times=-1, status=500, body=b""))
    async with open_store(rclone_bucket.settings(endpoint_url=fault_proxy.endpoint_url)) as store:
        await fails(ErrorKind.ACCESS_DENIED, store.probe())


async def test_a_probe_that_is_denied_says_so(rclone_bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    async with open_store(rclone_bucket.settings()) as store:
        await fails(ErrorKind.ACCESS_DENIED, store.probe())


async def test_settings_of_objects_reach_the_store(
    rclone_bucket: Bucket, fault_proxy: FaultProxy, region: Region
) -> None:
    settings = rclone_bucket.settings(
        endpoint_url=fault_proxy.endpoint_url,
        storage_class="STANDARD_IA",
        server_side_encryption="aws:kms",
        kms_key_id="key-1",
        tags=(("team", "a b"), ("run", "1")),
    )
    async with open_store(settings) as store:
        await store.put("small", b"x")
        await store.put_data("large", region, region_checksum(region))
        await store.create_upload("parts")

    small, large, parts = (request.headers for request in fault_proxy.log)
    for headers in (small, large, parts):
        assert headers["x-amz-server-side-encryption"] == "aws:kms"
        assert headers["x-amz-server-side-encryption-aws-kms-key-id"] == "key-1"
        assert headers["x-amz-tagging"] == "team=a+b&run=1"
    assert "x-amz-storage-class" not in small
    assert large["x-amz-storage-class"] == parts["x-amz-storage-class"] == "STANDARD_IA"


async def _get_into(store: ObjectStore, key: str, size_bytes: int, version: str) -> None:
    with tempfile.TemporaryFile() as into:
        await store.get_into(key, offset_bytes=0, size_bytes=size_bytes, version=version, descriptor=into.fileno())


async def _first(store: ObjectStore) -> None:
    async for _ in store.list(""):
        return


async def _first_upload(store: ObjectStore) -> None:
    async for _ in store.list_uploads(""):
        return

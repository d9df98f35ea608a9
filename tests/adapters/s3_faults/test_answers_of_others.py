"""An answer that is no success counts as none, and what a gateway says is not the store's word."""

from pathlib import Path

import pytest
from tests.adapters.s3_faults.store_calls import OPERATIONS, fails, first_of_list
from tests.regions import make_file, region_of
from tests.servers.fault_proxy import FaultProxy
from tests.servers.faults import Fault, Rule
from tests.servers.server import Bucket

from keepstep_agent.adapters.checksum import region_checksum
from keepstep_agent.adapters.open_store import open_store
from keepstep_agent.core.errors import ErrorKind
from keepstep_agent.core.model import Region
from keepstep_agent.ports import ObjectStore

NGINX_NOT_FOUND = (
    b"<html>\r\n<head><title>404 Not Found</title></head>\r\n<body>\r\n"
    b"<center><h1>404 Not Found</h1></center>\r\n<hr><center>nginx</center>\r\n</body>\r\n</html>\r\n"
)


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


@pytest.mark.parametrize(
    ("operation", "body"),
    [
        *((operation, NGINX_NOT_FOUND) for operation in OPERATIONS),
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
    call = OPERATIONS[operation]
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

    await fails(ErrorKind.STORE_FAILED, first_of_list(store))


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


async def test_a_probe_tells_its_first_error_and_not_that_of_the_removal(
    rclone_bucket: Bucket, fault_proxy: FaultProxy
) -> None:
    denied = b"<Error><Code>AccessDenied</Code><Message>no</Message></Error>"
    fault_proxy.add(Rule(name="put", fault=Fault.STATUS, method="PUT", times=-1, status=403, body=denied))
    fault_proxy.add(Rule(name="delete", fault=Fault.STATUS, method="DELETE", times=-1, status=500, body=b""))
    async with open_store(rclone_bucket.settings(endpoint_url=fault_proxy.endpoint_url)) as store:
        await fails(ErrorKind.ACCESS_DENIED, store.probe())

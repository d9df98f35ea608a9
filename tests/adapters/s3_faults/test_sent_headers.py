"""What a real S3 server is told beside the bytes: who asks, how they are checked, how they are kept."""

from collections.abc import Iterator

import pytest
from tests.adapters.s3_faults.store_calls import fails
from tests.servers.fault_proxy import FaultProxy
from tests.servers.faults import Fault, Rule
from tests.servers.server import Bucket

import keepstep_agent
from keepstep_agent.adapters.checksum import crc64nvme, region_checksum
from keepstep_agent.adapters.open_store import open_store
from keepstep_agent.core.errors import ErrorKind
from keepstep_agent.core.model import Region


@pytest.fixture
def second_proxy(fault_proxy: FaultProxy) -> Iterator[FaultProxy]:
    proxy = FaultProxy(fault_proxy.port)
    proxy.start()
    yield proxy
    proxy.stop()


async def test_a_stores_log_says_who_asked(rclone_bucket: Bucket, fault_proxy: FaultProxy) -> None:
    async with open_store(rclone_bucket.settings(endpoint_url=fault_proxy.endpoint_url)) as store:
        await store.put("a", b"x")

    assert [request.headers["user-agent"].split()[0] for request in fault_proxy.log] == [
        f"keepstep/{keepstep_agent.__version__}"
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

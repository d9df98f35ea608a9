"""A bit that flips on the way is found by what the store checks, or by the reader."""

from pathlib import Path

import pytest
from tests.adapters.s3_faults.store_calls import fails
from tests.servers.ceph import CephServer
from tests.servers.fault_proxy import FaultProxy
from tests.servers.faults import Fault, Rule
from tests.servers.seaweedfs import SeaweedServer
from tests.servers.server import Bucket

from keepstep_agent.adapters.checksum import crc64nvme, region_checksum
from keepstep_agent.adapters.open_store import open_store
from keepstep_agent.core.errors import ErrorKind
from keepstep_agent.core.model import Region
from keepstep_agent.core.settings.values import MIB
from keepstep_agent.ports import ObjectStore


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


@pytest.mark.nightly
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


@pytest.mark.nightly
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


@pytest.mark.nightly
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


async def test_a_store_that_refuses_every_checksum_counts_as_not_checking(
    store: ObjectStore, fault_proxy: FaultProxy, way: str
) -> None:
    body = b"<Error><Code>NotImplemented</Code></Error>"
    # What comes with a condition; the same without one is taken. Then what is to begin an upload.
    for method, times in (("PUT", 1), ("POST", 4)):
        fault_proxy.add(Rule(name="no", fault=Fault.STATUS, method=method, times=times, status=501, body=body))

    assert (await store.probe()).integrity == ("none" if way == "tls" else "sha256")

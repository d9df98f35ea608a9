"""Requests and answers that are cut, lost, doubled, stalled or slow."""

import asyncio
from pathlib import Path

import pytest
from tests.adapters.s3_faults.store_calls import fails
from tests.harness.bounds import HANG_SECONDS
from tests.harness.open_files import open_files
from tests.regions import make_file, region_of
from tests.servers.fault_proxy import FaultProxy
from tests.servers.faults import Fault, Rule
from tests.servers.process import wait_until
from tests.servers.server import Bucket

from keepstep_agent.adapters.checksum import crc64nvme, region_checksum
from keepstep_agent.adapters.open_store import open_store
from keepstep_agent.core.errors import ErrorKind
from keepstep_agent.core.model import Region
from keepstep_agent.core.settings.values import MIB
from keepstep_agent.ports import ObjectStore


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


async def test_a_stalled_request_ends_in_a_bounded_time(
    impatient_store: ObjectStore, fault_proxy: FaultProxy, region: Region
) -> None:
    fault_proxy.add(Rule(name="stall", fault=Fault.BLACKHOLE, method="PUT", after_bytes=100_000, times=2))
    fault_proxy.add(Rule(name="stall", fault=Fault.BLACKHOLE, method="HEAD"))

    async with asyncio.timeout(HANG_SECONDS):
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


async def test_bytes_that_a_server_does_not_read_time_out(
    impatient_store: ObjectStore, fault_proxy: FaultProxy
) -> None:
    body = bytearray(8 * MIB)
    fault_proxy.add(Rule(name="stall", fault=Fault.BLACKHOLE, method="PUT", after_bytes=100_000))
    await fails(ErrorKind.TIMED_OUT, impatient_store.put_data("a", body, crc64nvme(body)))

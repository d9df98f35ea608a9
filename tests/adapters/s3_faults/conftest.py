"""A store on a real S3 server behind a proxy that breaks things, in each way that bytes move."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from tests.harness.plain_transfer import PlainTransfer
from tests.regions import make_file, region_of
from tests.servers.fault_proxy import FaultProxy
from tests.servers.rclone import RcloneServer
from tests.servers.server import Bucket
from tests.servers.tls import Certificate

from keepstep_agent.adapters.rate_limit import RateLimiter
from keepstep_agent.adapters.s3.store import open_s3_store
from keepstep_agent.adapters.transfer.direct import DirectTransfer
from keepstep_agent.core.model import Region
from keepstep_agent.core.settings.values import MIB, StoreSettings
from keepstep_agent.ports import ObjectStore


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

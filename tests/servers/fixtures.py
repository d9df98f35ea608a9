"""Real S3 servers as fixtures: one of each per worker process, a fresh bucket for each test."""

import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Protocol, TypeVar

import pytest
from tests.servers.ceph import CephServer, missing_programs
from tests.servers.fault_proxy import FaultProxy
from tests.servers.faults import Fault, Rule
from tests.servers.moto import MotoServer
from tests.servers.rclone import RcloneServer
from tests.servers.seaweedfs import SeaweedServer
from tests.servers.server import ENVIRONMENT, Bucket, make_bucket
from tests.servers.tls import Certificate, make_certificate


class _Startable(Protocol):
    def start(self) -> None: ...

    def stop(self) -> None: ...


_Server = TypeVar("_Server", bound=_Startable)


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return make_certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="session")
def rclone_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RcloneServer]:
    yield from _serving(RcloneServer(tmp_path_factory.mktemp("rclone") / "data"))


@pytest.fixture(scope="session")
def rclone_tls_server(tmp_path_factory: pytest.TempPathFactory, certificate: Certificate) -> Iterator[RcloneServer]:
    yield from _serving(RcloneServer(tmp_path_factory.mktemp("rclone-tls") / "data", certificate))


@pytest.fixture(scope="session")
def moto_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MotoServer]:
    yield from _serving(MotoServer(tmp_path_factory.mktemp("moto")))


@pytest.fixture(scope="session")
def ceph_server() -> Iterator[CephServer]:
    missing = missing_programs()
    if missing:
        pytest.skip(f"Ceph is not installed ({', '.join(missing)}): apt install ceph-mon ceph-osd ceph-common radosgw")
    # pytest's own directories are too deep for Ceph's unix sockets.
    directory = Path(tempfile.mkdtemp(prefix="ceph-"))
    try:
        yield from _serving(CephServer(directory))
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="session")
def seaweed_server() -> Iterator[SeaweedServer]:
    # pytest's own directories are too deep for its unix sockets too.
    with tempfile.TemporaryDirectory(prefix="weed-") as directory:
        yield from _serving(SeaweedServer(Path(directory)))


@pytest.fixture
def s3_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials for these servers, in this process and its children."""
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL", "AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def rclone_bucket(rclone_server: RcloneServer, s3_environment: None) -> Bucket:
    return make_bucket(rclone_server)


@pytest.fixture
def rclone_tls_bucket(rclone_tls_server: RcloneServer, s3_environment: None) -> Bucket:
    return make_bucket(rclone_tls_server)


@pytest.fixture
def moto_bucket(moto_server: MotoServer, s3_environment: None) -> Bucket:
    return make_bucket(moto_server)


@pytest.fixture
def ceph_bucket(ceph_server: CephServer, s3_environment: None) -> Bucket:
    return make_bucket(ceph_server)


@pytest.fixture
def seaweed_bucket(seaweed_server: SeaweedServer, s3_environment: None) -> Bucket:
    return make_bucket(seaweed_server)


@pytest.fixture
def fault_proxy(rclone_server: RcloneServer) -> Iterator[FaultProxy]:
    """Breaks HTTP on the way to rclone; use `bucket.settings(endpoint_url=fault_proxy.endpoint_url)`."""
    proxy = FaultProxy(rclone_server.port)
    yield from _serving(proxy)


@pytest.fixture
def verifying_bucket(rclone_bucket: Bucket, fault_proxy: FaultProxy) -> Bucket:
    """On rclone, behind a proxy that refuses what has not the CRC64NVME it came with."""
    fault_proxy.add(Rule(name="check", fault=Fault.CHECK_CRC64NVME, method="PUT", times=-1))
    return replace(rclone_bucket, endpoint_url=fault_proxy.endpoint_url)


def _serving(server: _Server) -> Iterator[_Server]:
    try:
        server.start()
        yield server
    finally:
        server.stop()

"""A CA bundle that its owner replaces while the store is open: connections are verified by what it says then."""

import asyncio
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from tests.adapters.s3_faults.store_calls import fails
from tests.harness.bounds import HANG_SECONDS
from tests.servers.fault_proxy import FaultProxy
from tests.servers.rclone import RcloneServer
from tests.servers.server import Bucket
from tests.servers.tls import Certificate, make_certificate

from keepstep_agent.adapters.open_store import open_store
from keepstep_agent.adapters.receivers.url import post_event
from keepstep_agent.adapters.s3 import renewal
from keepstep_agent.core.errors import ErrorKind, EventReceiverError
from keepstep_agent.ports import ObjectStore


@pytest.fixture
def proxy(rclone_server: RcloneServer, certificate: Certificate) -> Iterator[FaultProxy]:
    made = FaultProxy(rclone_server.port, certificate=certificate)
    made.start()
    try:
        yield made
    finally:
        made.stop()


@pytest.fixture
def bundle(certificate: Certificate, tmp_path: Path) -> Path:
    return Path(shutil.copy(certificate.certificate, tmp_path / "ca.crt"))


@pytest.fixture(params=["setting", "AWS_CA_BUNDLE"])
def ca_bundle(request: pytest.FixtureRequest, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The setting; empty where the bundle is named in the environment."""
    if request.param == "setting":
        return str(bundle)
    monkeypatch.setenv(request.param, str(bundle))
    return ""


def append(bundle: Path, certificate: Certificate) -> None:
    bundle.write_bytes(bundle.read_bytes() + certificate.certificate.read_bytes())


def break_off(bundle: Path) -> None:
    bundle.write_bytes(bundle.read_bytes()[:100])


async def read_over_a_new_connection(store: ObjectStore) -> bytes:
    return await store.get("a", limit_bytes=9, fresh=True)


async def put_until_logged(store: ObjectStore) -> list[str]:
    """Events that were logged. A look at the bundle begins with a request, and does not hold it up."""
    with capture_logs() as logs:
        while not logs:
            await store.put("a", b"x")
    return [line["event"] for line in logs]


async def test_a_new_ca_counts_once_the_bundle_names_it_and_the_old_one_no_more(
    rclone_bucket: Bucket, proxy: FaultProxy, bundle: Path, ca_bundle: str, certificate: Certificate, tmp_path: Path
) -> None:
    async with open_store(rclone_bucket.settings(endpoint_url=proxy.endpoint_url, ca_bundle=ca_bundle)) as store:
        await store.put("a", b"x")
        other = make_certificate(tmp_path / "other")
        proxy.serve_with(other)
        error = await fails(ErrorKind.UNREACHABLE, read_over_a_new_connection(store))
        assert "certificate" in str(error)
        shutil.copy(other.certificate, bundle)
        # It is read after a failure, for the next attempt.
        await fails(ErrorKind.UNREACHABLE, read_over_a_new_connection(store))
        assert await read_over_a_new_connection(store) == b"x"
        await store.put("a", b"x")
        proxy.serve_with(certificate)
        await fails(ErrorKind.UNREACHABLE, read_over_a_new_connection(store))


async def test_a_bundle_that_changes_is_read_before_anything_fails(
    rclone_bucket: Bucket, proxy: FaultProxy, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(renewal, "LOOK_SECONDS", 0.0)
    async with open_store(rclone_bucket.settings(endpoint_url=proxy.endpoint_url, ca_bundle=str(bundle))) as store:
        await store.put("a", b"x")
        other = make_certificate(tmp_path / "other")
        append(bundle, other)
        assert await put_until_logged(store) == ["ca_bundle.renewed"]
        proxy.serve_with(other)
        assert await read_over_a_new_connection(store) == b"x"


async def test_a_transfer_under_way_goes_on_when_the_bundle_changes(
    rclone_bucket: Bucket, proxy: FaultProxy, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(renewal, "LOOK_SECONDS", 0.0)
    async with open_store(rclone_bucket.settings(endpoint_url=proxy.endpoint_url, ca_bundle=str(bundle))) as store:
        content = bytes(4 * 1024 * 1024)
        await store.put("large", content)
        proxy.throttle(256 * 1024)
        transfer = asyncio.create_task(store.get("large", limit_bytes=len(content)))
        append(bundle, make_certificate(tmp_path / "other"))
        assert await put_until_logged(store) == ["ca_bundle.renewed"]
        proxy.throttle(0)
        assert await transfer == content


@pytest.mark.parametrize("harm", [break_off, Path.unlink])
async def test_a_bundle_that_is_half_written_or_gone_changes_nothing(
    harm: Callable[[Path], None],
    rclone_bucket: Bucket,
    proxy: FaultProxy,
    bundle: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(renewal, "LOOK_SECONDS", 0.0)
    async with open_store(rclone_bucket.settings(endpoint_url=proxy.endpoint_url, ca_bundle=str(bundle))) as store:
        await store.put("a", b"x")
        assert await read_over_a_new_connection(store) == b"x"
        harm(bundle)
        assert (await put_until_logged(store))[0] == "ca_bundle.unusable"
        assert await read_over_a_new_connection(store) == b"x"


async def test_an_event_is_sent_to_a_receiver_whose_ca_was_replaced(
    proxy: FaultProxy, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(bundle))
    other = make_certificate(tmp_path / "other")
    proxy.serve_with(other)
    kinds = []
    for authority in (bundle, other.certificate):
        if authority != bundle:
            shutil.copy(authority, bundle)
        with pytest.raises(EventReceiverError) as caught:
            await post_event(f"{proxy.endpoint_url}/hook", b"{}", HANG_SECONDS)
        kinds.append(caught.value.kind)
    # What answers there is no receiver of events.
    assert kinds == [ErrorKind.UNREACHABLE, ErrorKind.REQUEST_REFUSED]

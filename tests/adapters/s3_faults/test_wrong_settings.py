"""A real S3 server, or none, that is told the wrong things: each error says which."""

import datetime

import botocore.auth
import pytest
from tests.adapters.s3_faults.store_calls import fails, first_of_list
from tests.harness.bounds import HANG_SECONDS
from tests.lanes import nightly
from tests.servers.process import free_port
from tests.servers.server import SECRET_KEY, Bucket

from keepstep_agent.adapters.open_store import open_store
from keepstep_agent.core.errors import ErrorKind


@pytest.mark.parametrize("server", ["rclone", *nightly("seaweed", "ceph")])
async def test_a_wrong_access_key_is_denied(
    server: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket: Bucket = request.getfixturevalue(f"{server}_bucket")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody-knows-this")
    async with open_store(bucket.settings()) as store:
        error = await fails(ErrorKind.ACCESS_DENIED, store.put("a", b"x"))

    assert bucket.name in str(error)
    assert "access key id" in error.hint


@pytest.mark.parametrize("server", ["rclone", *nightly("seaweed", "ceph")])
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


@pytest.mark.parametrize("server", ["rclone", "moto", *nightly("seaweed", "ceph")])
async def test_a_missing_bucket_is_missing_for_every_operation(server: str, request: pytest.FixtureRequest) -> None:
    bucket: Bucket = request.getfixturevalue(f"{server}_bucket")
    settings = bucket.settings(destination="s3://there-is-no-such-bucket/run")
    async with open_store(settings) as store:
        for operation in (store.put("a", b"x"), store.head("a"), store.get("a", limit_bytes=1), first_of_list(store)):
            await fails(ErrorKind.BUCKET_MISSING, operation)


async def test_a_dead_endpoint_is_unreachable(rclone_bucket: Bucket) -> None:
    async with open_store(rclone_bucket.settings(endpoint_url=f"http://127.0.0.1:{free_port()}")) as store:
        await fails(ErrorKind.UNREACHABLE, store.put("a", b"x"))


async def test_an_unknown_host_is_unreachable(rclone_bucket: Bucket) -> None:
    # Longer than a resolver tries that is told nothing: its word is asked for, not how soon it comes.
    settings = rclone_bucket.settings(endpoint_url="http://store.invalid", connect_timeout_seconds=HANG_SECONDS)
    async with open_store(settings) as store:
        await fails(ErrorKind.UNREACHABLE, store.put("a", b"x"))


async def test_an_unknown_certificate_authority_is_named(rclone_tls_bucket: Bucket) -> None:
    async with open_store(rclone_tls_bucket.settings(ca_bundle="")) as store:
        error = await fails(ErrorKind.UNREACHABLE, store.put("a", b"x"))

    assert "CA bundle" in error.hint


async def test_an_unverified_certificate_is_accepted_when_asked_for(rclone_tls_bucket: Bucket) -> None:
    async with open_store(rclone_tls_bucket.settings(ca_bundle="", verify_tls=False)) as store:
        await store.put("a", b"x")


@pytest.mark.nightly
async def test_a_skewed_clock_has_its_own_kind(ceph_bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    def an_hour_late(remove_tzinfo: bool = True) -> datetime.datetime:
        now = datetime.datetime.now(datetime.UTC) - datetime.timedelta(hours=1)
        return now.replace(tzinfo=None) if remove_tzinfo else now

    monkeypatch.setattr(botocore.auth, "get_current_datetime", an_hour_late)
    async with open_store(ceph_bucket.settings()) as store:
        error = await fails(ErrorKind.CLOCK_SKEWED, store.put("a", b"x"))

    assert "clock" in error.hint


async def test_a_probe_that_is_denied_says_so(rclone_bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    async with open_store(rclone_bucket.settings()) as store:
        await fails(ErrorKind.ACCESS_DENIED, store.probe())

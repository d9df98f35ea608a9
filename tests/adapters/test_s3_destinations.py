"""Buckets by other names: access points, Ceph's tenants, and buckets whose owner does not pay."""

import asyncio

import pytest
from tests.harness.warm_python import keepstep
from tests.servers.fault_proxy import FaultProxy
from tests.servers.scripted import Asked, ScriptedServer
from tests.servers.server import Bucket

from keepstep_agent.adapters.open_store import open_store
from keepstep_agent.adapters.s3.client import Destination, parse_destination
from keepstep_agent.core.errors import KeepstepError
from keepstep_agent.core.settings.values import StoreSettings
from keepstep_agent.doctor import Verdict, examine

_ACCOUNT = "us-west-2:123456789012"
_LISTING = b"<ListBucketResult><KeyCount>0</KeyCount><IsTruncated>false</IsTruncated></ListBucketResult>"


@pytest.mark.parametrize(
    ("url", "bucket", "prefix"),
    [
        ("s3://bucket", "bucket", ""),
        ("s3://bucket/runs/one/", "bucket", "runs/one/"),
        (f"s3://arn:aws:s3:{_ACCOUNT}:accesspoint/ap", f"arn:aws:s3:{_ACCOUNT}:accesspoint/ap", ""),
        (f"s3://arn:aws:s3:{_ACCOUNT}:accesspoint/ap/runs/one", f"arn:aws:s3:{_ACCOUNT}:accesspoint/ap", "runs/one/"),
        (f"s3://arn:aws:s3:{_ACCOUNT}:accesspoint:ap/runs", f"arn:aws:s3:{_ACCOUNT}:accesspoint:ap", "runs/"),
        (
            "s3://arn:aws:s3::123456789012:accesspoint/m.mrap/runs",
            "arn:aws:s3::123456789012:accesspoint/m.mrap",
            "runs/",
        ),
        (
            f"s3://arn:aws:s3-outposts:{_ACCOUNT}:outpost/op-1/accesspoint/ap/runs",
            f"arn:aws:s3-outposts:{_ACCOUNT}:outpost/op-1/accesspoint/ap",
            "runs/",
        ),
        ("s3://tenant:bucket/runs", "tenant:bucket", "runs/"),
        ("s3://:bucket/runs", ":bucket", "runs/"),
    ],
)
def test_a_destination_is_a_bucket_and_a_prefix(url: str, bucket: str, prefix: str) -> None:
    assert parse_destination(url) == Destination(bucket=bucket, prefix=prefix)


@pytest.mark.parametrize(
    "url",
    [
        "s3://",
        "s3:///runs",
        "s3://bucket/a//b",
        "s3://a b/runs",
        "s3://a:b:c/runs",
        "s3://arn:aws:s3:us-west-2:12:accesspoint/ap",
        "s3://arn:aws:s3:us-west-2:123456789012:accesspoint/",
        "s3://arn:aws:sqs:us-west-2:123456789012:queue",
        "https://bucket/runs",
    ],
)
def test_what_names_no_bucket_is_refused_with_a_hint(url: str) -> None:
    with pytest.raises(KeepstepError, match="is not an S3 destination") as caught:
        parse_destination(url)
    assert "access point" in caught.value.hint


async def test_an_access_point_is_asked_at_its_own_host_for_keys_below_the_prefix(
    s3_environment: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
        length = f"Content-Length: {len(_LISTING)}\r\n\r\n".encode()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/xml\r\n" + length + _LISTING)

    async with ScriptedServer(answer) as proxy:
        monkeypatch.setenv("HTTP_PROXY", proxy.url)
        monkeypatch.delenv("NO_PROXY", raising=False)
        monkeypatch.delenv("no_proxy", raising=False)
        destination = f"s3://arn:aws:s3:{_ACCOUNT}:accesspoint/ap/runs/one"
        settings = StoreSettings(destination=destination, endpoint_url="http://s3.example.test")
        async with open_store(settings) as store:
            assert [one async for one in store.list("")] == []
    (asked,) = proxy.asked
    assert asked.target.startswith("http://ap-123456789012.s3.example.test/?")
    assert "prefix=runs%2Fone%2F" in asked.target
    assert "/us-west-2/s3/aws4_request" in asked.headers["authorization"]


async def test_the_tenant_of_a_bucket_is_sent_to_the_store(rclone_bucket: Bucket, fault_proxy: FaultProxy) -> None:
    settings = rclone_bucket.settings(destination="s3://tenant:bucket/runs", endpoint_url=fault_proxy.endpoint_url)
    async with open_store(settings) as store:
        with pytest.raises(KeepstepError):  # rclone knows no tenants
            await store.put("a", b"a")
    assert [one.path for one in fault_proxy.log] == ["/tenant%3Abucket/runs/a"]


@pytest.mark.nightly
async def test_ceph_finds_the_bucket_of_its_empty_tenant(ceph_bucket: Bucket) -> None:
    async with open_store(ceph_bucket.settings(destination=f"s3://:{ceph_bucket.name}/runs")) as store:
        await store.put("a", b"a")
        assert await store.get("a", limit_bytes=1) == b"a"


async def test_every_request_to_a_bucket_whose_owner_does_not_pay_says_who_does(
    rclone_bucket: Bucket, fault_proxy: FaultProxy
) -> None:
    for pays in (True, False):
        fault_proxy.log.clear()
        settings = rclone_bucket.settings(endpoint_url=fault_proxy.endpoint_url, requester_pays=pays)
        assert not [one async for one in examine(settings) if one.verdict is Verdict.FAIL]
        said = {
            (one.headers.get("x-amz-request-payer"), "payer" in one.headers["authorization"]) for one in fault_proxy.log
        }
        assert said == {("requester", True) if pays else (None, False)}
        assert {one.method for one in fault_proxy.log} == {"GET", "PUT", "POST", "HEAD", "DELETE"}


def test_commands_for_a_destination_may_say_who_pays(rclone_bucket: Bucket, fault_proxy: FaultProxy) -> None:
    listed = keepstep("ls", rclone_bucket.destination, "--endpoint-url", fault_proxy.endpoint_url, "--requester-pays")
    assert listed.returncode == 0, listed.stderr
    assert {one.headers.get("x-amz-request-payer") for one in fault_proxy.log} == {"requester"}


@pytest.mark.parametrize("what", ["no credentials", "an access point by path"])
async def test_the_doctor_says_that_a_store_answers_only_if_it_was_asked(
    what: str, rclone_bucket: Bucket, fault_proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = rclone_bucket.settings(endpoint_url=fault_proxy.endpoint_url)
    if what == "no credentials":
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name)
    else:
        settings = StoreSettings(
            destination=f"s3://arn:aws:s3:{_ACCOUNT}:accesspoint/ap",
            endpoint_url=fault_proxy.endpoint_url,
            addressing="path",
        )
    found = {one.name: one async for one in examine(settings)}
    assert not fault_proxy.log
    assert found["reachable"].verdict is Verdict.FAIL
    assert "list" not in found

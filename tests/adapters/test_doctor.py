"""The doctor against healthy, weak and sick destinations."""

from pathlib import Path

import pytest
from tests.lanes import nightly
from tests.servers.fault_proxy import FaultProxy
from tests.servers.faults import Fault, Rule
from tests.servers.process import free_port
from tests.servers.server import Bucket

from keepstep_agent.core.settings.values import StoreSettings
from keepstep_agent.doctor import Finding, Verdict, examine

ALL = {
    "reachable",
    "list",
    "put",
    "get",
    "clock",
    "delete",
    "conditional writes",
    "integrity",
    "multipart",
    "upload",
    "download",
}
RULES = {"unfinished uploads", "old versions"}
"""Questions that a bucket answers, and a directory does not."""


async def findings(settings: StoreSettings) -> dict[str, Finding]:
    return {finding.name: finding async for finding in examine(settings)}


@pytest.mark.parametrize("server", ["rclone", *nightly("seaweed", "ceph")])
async def test_a_healthy_store_passes_every_question_and_is_left_clean(
    server: str, request: pytest.FixtureRequest
) -> None:
    bucket: Bucket = request.getfixturevalue(f"{server}_bucket")

    found = await findings(bucket.settings())

    assert set(found) == ALL | RULES
    assert not [finding for finding in found.values() if finding.verdict is Verdict.FAIL]
    expected = Verdict.WARN if server == "rclone" else Verdict.OK
    assert found["conditional writes"].verdict is expected
    assert "MiB/s" in found["upload"].detail
    assert "Contents" not in bucket.client().list_objects_v2(Bucket=bucket.name)


async def test_a_directory_can_be_examined_too(tmp_path: Path) -> None:
    (tmp_path / "destination").mkdir()
    found = await findings(StoreSettings(destination=f"file://{tmp_path}/destination"))

    assert set(found) == ALL
    assert {found["conditional writes"].verdict, found["integrity"].verdict} == {Verdict.OK}


async def test_what_piles_up_unseen_is_advice_and_no_failure(moto_bucket: Bucket) -> None:
    client, name = moto_bucket.client(), moto_bucket.name
    client.put_bucket_versioning(Bucket=name, VersioningConfiguration={"Status": "Enabled"})

    found = await findings(moto_bucket.settings())

    assert {found[rule].verdict for rule in RULES} == {Verdict.WARN}
    assert "AbortIncompleteMultipartUpload" in found["unfinished uploads"].hint
    assert "NoncurrentVersionExpiration" in found["old versions"].hint
    assert not [one for one in found.values() if one.verdict is Verdict.FAIL]

    rule = {
        "ID": "tidy",
        "Status": "Enabled",
        "Filter": {"Prefix": ""},
        "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 7},
        "NoncurrentVersionExpiration": {"NoncurrentDays": 30},
    }
    client.put_bucket_lifecycle_configuration(Bucket=name, LifecycleConfiguration={"Rules": [rule]})

    found = await findings(moto_bucket.settings())

    assert {found[rule].verdict for rule in RULES} == {Verdict.OK}


@pytest.mark.parametrize(
    ("status", "body", "hint"),
    [
        (403, b"<Error><Code>AccessDenied</Code></Error>", "allow s3:GetLifecycleConfiguration to know"),
        (501, b"<Error><Code>NotImplemented</Code></Error>", "look at the rules of the bucket"),
        # A store that does not know the question lists the bucket.
        (200, b"<ListBucketResult><Name>bucket</Name></ListBucketResult>", "look at the rules of the bucket"),
    ],
)
async def test_a_store_that_does_not_tell_its_rules_is_no_failure(
    rclone_bucket: Bucket, fault_proxy: FaultProxy, status: int, body: bytes, hint: str
) -> None:
    fault_proxy.add(Rule(name="ask", fault=Fault.STATUS, target="?lifecycle", times=-1, status=status, body=body))

    found = await findings(rclone_bucket.settings(endpoint_url=fault_proxy.endpoint_url))

    assert found["unfinished uploads"].verdict is Verdict.WARN
    assert found["unfinished uploads"].detail.startswith("could not be determined: GetBucketLifecycleConfiguration s3:")
    assert found["unfinished uploads"].hint.startswith(hint)
    assert not [one for one in found.values() if one.verdict is Verdict.FAIL]


async def test_a_dead_endpoint_is_the_only_finding(rclone_bucket: Bucket) -> None:
    found = await findings(rclone_bucket.settings(endpoint_url=f"http://127.0.0.1:{free_port()}"))

    assert [(finding.name, finding.verdict) for finding in found.values()] == [("reachable", Verdict.FAIL)]
    assert "endpoint" in found["reachable"].hint


@pytest.mark.nightly
async def test_wrong_credentials_reach_the_store_but_may_do_nothing(
    ceph_bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")

    found = await findings(ceph_bucket.settings())

    assert found["reachable"].verdict is Verdict.OK
    assert found["list"].verdict is found["put"].verdict is Verdict.FAIL
    assert "secret" in found["put"].hint


async def test_a_missing_bucket_is_said(rclone_bucket: Bucket) -> None:
    found = await findings(rclone_bucket.settings(destination="s3://there-is-no-such-bucket/run"))

    assert "create the bucket" in found["reachable"].hint


async def test_a_destination_that_is_none_is_a_finding() -> None:
    found = await findings(StoreSettings(destination="nowhere"))

    assert found["settings"].verdict is Verdict.FAIL


async def test_bytes_that_change_on_the_way_back_are_found(rclone_bucket: Bucket, fault_proxy: FaultProxy) -> None:
    fault_proxy.add(Rule(name="flip", fault=Fault.FLIP_RESPONSE, method="GET", after_bytes=5_000_000))
    fault_proxy.add(Rule(name="flip", fault=Fault.FLIP_RESPONSE, method="GET", after_bytes=5_000_000, times=8))

    found = await findings(rclone_bucket.settings(endpoint_url=fault_proxy.endpoint_url))

    assert found["download"].verdict is Verdict.FAIL
    assert "other bytes than those that were sent" in found["download"].detail

"""The doctor against healthy, weak and sick destinations."""

from pathlib import Path

import pytest
from tests.servers.fault_proxy import Fault, FaultProxy, Rule
from tests.servers.process import free_port
from tests.servers.server import Bucket

from mooring_agent.core.settings.values import StoreSettings
from mooring_agent.doctor import Finding, Verdict, examine

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


async def findings(settings: StoreSettings) -> dict[str, Finding]:
    return {finding.name: finding async for finding in examine(settings)}


@pytest.mark.parametrize("server", ["rclone", "ceph"])
async def test_a_healthy_store_passes_every_question_and_is_left_clean(
    server: str, request: pytest.FixtureRequest
) -> None:
    bucket: Bucket = request.getfixturevalue(f"{server}_bucket")

    found = await findings(bucket.settings())

    assert set(found) == ALL
    assert not [finding for finding in found.values() if finding.verdict is Verdict.FAIL]
    expected = Verdict.OK if server == "ceph" else Verdict.WARN
    assert found["conditional writes"].verdict is expected
    assert "MiB/s" in found["upload"].detail
    assert "Contents" not in bucket.client().list_objects_v2(Bucket=bucket.name)


async def test_a_directory_can_be_examined_too(tmp_path: Path) -> None:
    (tmp_path / "destination").mkdir()
    found = await findings(StoreSettings(destination=f"file://{tmp_path}/destination"))

    assert set(found) == ALL
    assert {found["conditional writes"].verdict, found["integrity"].verdict} == {Verdict.OK}


async def test_a_dead_endpoint_is_the_only_finding(rclone_bucket: Bucket) -> None:
    found = await findings(rclone_bucket.settings(endpoint_url=f"http://127.0.0.1:{free_port()}"))

    assert [(finding.name, finding.verdict) for finding in found.values()] == [("reachable", Verdict.FAIL)]
    assert "endpoint" in found["reachable"].hint


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

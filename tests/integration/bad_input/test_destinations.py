"""A bucket, key, endpoint or setting that is wrong is named, and nothing is lost until it is mended."""

from pathlib import Path
from typing import Any

import pytest
from tests.harness.agent_process import AgentProcess, wait_until
from tests.harness.bounds import HANG_SECONDS
from tests.integration.bad_input.agent_calls import good_checkpoint, make_agent
from tests.lanes import nightly
from tests.servers.process import free_port
from tests.servers.rclone import RcloneServer
from tests.servers.server import Bucket


def storage_trouble(agent: AgentProcess, kind: str) -> str:
    """Wait for it in the status and in the log; its hint."""

    def found() -> list[dict[str, Any]]:
        return [line for line in agent.log("work.failed") if line["kind"] == kind]

    # A busy machine may see a time-out first.
    wait_until(lambda: bool(found()), HANG_SECONDS, f"the log says {kind}")
    wait_until(
        lambda: agent.status().storage_error != "", HANG_SECONDS, "the status says what is wrong with the storage"
    )
    line = found()[0]
    assert line["error"]
    hint: str = line["hint"]
    assert hint
    return hint


def test_a_bucket_that_is_not_there_is_named_and_its_making_mends_it(tmp_path: Path, rclone_bucket: Bucket) -> None:
    name = f"{rclone_bucket.name}-absent"
    agent = AgentProcess(tmp_path / "volume", f"s3://{name}/runs/one", endpoint_url=rclone_bucket.endpoint_url)
    with agent:
        save = agent.announce(good_checkpoint(agent), 7).save
        assert "bucket" in storage_trouble(agent, "bucket-missing")
        assert name in agent.status().storage_error
        rclone_bucket.client().create_bucket(Bucket=name)
        agent.wait_committed(save)
        assert agent.status().storage_error == ""


@pytest.mark.parametrize("bucket_name", ["rclone_bucket", *nightly("ceph_bucket")])
def test_a_wrong_secret_key_is_named_and_nothing_is_lost(
    tmp_path: Path, bucket_name: str, request: pytest.FixtureRequest
) -> None:
    bucket: Bucket = request.getfixturevalue(bucket_name)
    wrong = AgentProcess(
        tmp_path / "volume",
        bucket.destination,
        environment={"AWS_SECRET_ACCESS_KEY": "not-the-secret"},
        endpoint_url=bucket.endpoint_url,
    )
    with wrong:
        save = wrong.announce(good_checkpoint(wrong), 7).save
        assert "key" in storage_trouble(wrong, "access-denied")
        assert "not-the-secret" not in wrong.log_text()
    with make_agent(tmp_path / "volume", bucket) as mended:
        mended.wait_committed(save)


def test_an_endpoint_that_nobody_serves_is_named_and_waited_for(tmp_path: Path, s3_environment: None) -> None:
    server = RcloneServer(tmp_path / "data")
    agent = AgentProcess(tmp_path / "volume", "s3://later/run", endpoint_url=server.endpoint_url)
    with agent:
        save = agent.announce(good_checkpoint(agent), 7).save
        storage_trouble(agent, "unreachable")
        assert server.endpoint_url in agent.status().storage_error
        (tmp_path / "data" / "later").mkdir(parents=True)
        server.start()
        try:
            agent.wait_committed(save)
        finally:
            server.stop()


def test_wrong_settings_are_all_named_with_a_hint(tmp_path: Path) -> None:
    agent = AgentProcess(tmp_path / "volume", "ftp://bucket/run", grace_seconds="soon")
    assert agent.start_refused() == 2
    lines = agent.log_text().splitlines()
    assert lines[-1] == "hint: every setting is described in docs/settings.md"
    assert "error: --grace-seconds: 'soon' is not a number" in lines
    assert "error: --destination: 'ftp://bucket/run' is neither s3://bucket/prefix nor file:///absolute/path" in lines


def test_the_password_of_an_endpoint_is_in_no_line_and_no_status(tmp_path: Path, s3_environment: None) -> None:
    endpoint = f"https://user:hunter2@127.0.0.1:{free_port()}"
    unverified = {"KEEPSTEP_S3_VERIFY_TLS": "false"}
    with AgentProcess(tmp_path / "volume", "s3://bucket/run", endpoint_url=endpoint, environment=unverified) as agent:
        agent.announce(good_checkpoint(agent), 7)
        wait_until(lambda: agent.status().storage_error != "", HANG_SECONDS, "the status says what is wrong")
        assert "hunter2" not in agent.status().storage_error
    assert agent.log("tls.not_verified")[0]["endpoint"] == endpoint.replace("user:hunter2@", "")
    assert "hunter2" not in agent.log_text()

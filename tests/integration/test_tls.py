"""Over HTTPS with a CA of one's own: it works, a wrong CA is a clear error, and not verifying is said loudly."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.harness.agent_process import AgentProcess, tree, wait_until, write_checkpoint
from tests.harness.bounds import HANG_SECONDS
from tests.servers.server import Bucket
from tests.servers.tls import make_certificate

MIB = 1024 * 1024
SIZES = {"model.safetensors": 12 * MIB, "config.json": 300}


def make_agent(volume: Path, bucket: Bucket, **settings: Any) -> AgentProcess:
    return AgentProcess(
        volume, bucket.destination, endpoint_url=bucket.endpoint_url, part_size_bytes="5MiB", watch="off", **settings
    )


def restore(bucket: Bucket, volume: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    line = [sys.executable, "-m", "keepstep_agent", "restore", bucket.destination, f"--volume={volume}"]
    line += [f"--endpoint-url={bucket.endpoint_url}", *arguments]
    return subprocess.run(line, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)


def commit_one(agent: AgentProcess) -> dict[str, bytes]:
    source = write_checkpoint(agent.checkpoints / "checkpoint-7", SIZES)
    agent.wait_committed(agent.announce(source, 7).save)
    return tree(source)


def test_upload_and_restore_with_the_ca_that_signed_the_store(rclone_tls_bucket: Bucket, tmp_path: Path) -> None:
    assert rclone_tls_bucket.endpoint_url.startswith("https://")
    with make_agent(tmp_path / "volume", rclone_tls_bucket, ca_bundle=rclone_tls_bucket.ca_bundle) as agent:
        original = commit_one(agent)
        assert not agent.log("tls.not_verified")
    restored = restore(rclone_tls_bucket, tmp_path / "other", f"--ca-bundle={rclone_tls_bucket.ca_bundle}")
    assert restored.returncode == 0, restored.stderr
    assert tree(tmp_path / "other/checkpoints/checkpoint-7") == original


def test_with_another_ca_the_error_names_it_and_the_right_one_mends_it(
    rclone_tls_bucket: Bucket, tmp_path: Path
) -> None:
    wrong = make_certificate(tmp_path / "wrong").certificate
    with make_agent(tmp_path / "volume", rclone_tls_bucket, ca_bundle=wrong) as agent:
        source = write_checkpoint(agent.checkpoints / "checkpoint-7", SIZES)
        original = tree(source)
        save = agent.announce(source, 7).save
        wait_until(lambda: agent.status().storage_error != "", HANG_SECONDS, "the status says what is wrong")
        assert "certificate" in agent.status().storage_error
        line = agent.log("work.failed")[0]
        assert "certificate" in line["error"]
        assert line["hint"].endswith("--ca-bundle (in a pod keepstep.dev/ca-bundle)")
    refused = restore(rclone_tls_bucket, tmp_path / "other", f"--ca-bundle={wrong}")
    assert refused.returncode == 1
    error, hint = refused.stderr.splitlines()[-2:]
    assert error.startswith("error: ")
    assert "certificate" in error
    assert hint.startswith("hint: ")
    assert not (tmp_path / "other/checkpoints/checkpoint-7").exists()

    with make_agent(tmp_path / "volume", rclone_tls_bucket, ca_bundle=rclone_tls_bucket.ca_bundle) as mended:
        mended.wait_committed(save)
    restored = restore(rclone_tls_bucket, tmp_path / "other", f"--ca-bundle={rclone_tls_bucket.ca_bundle}")
    assert restored.returncode == 0, restored.stderr
    assert tree(tmp_path / "other/checkpoints/checkpoint-7") == original


def test_a_ca_bundle_that_is_not_there_is_named_and_mended_by_putting_it_there(
    rclone_tls_bucket: Bucket, tmp_path: Path
) -> None:
    absent = tmp_path / "ca.pem"
    refused = restore(rclone_tls_bucket, tmp_path / "other", f"--ca-bundle={absent}")
    assert refused.returncode == 1
    assert refused.stderr.splitlines() == [
        f"error: cannot use the CA bundle {absent}: No such file or directory",
        "hint: set --ca-bundle (in a pod keepstep.dev/ca-bundle) to a PEM file with certificates that this process can "
        "read",
    ]
    with make_agent(tmp_path / "volume", rclone_tls_bucket, ca_bundle=absent) as agent:
        save = agent.announce(write_checkpoint(agent.checkpoints / "checkpoint-7", SIZES), 7).save
        wait_until(lambda: str(absent) in agent.status().storage_error, HANG_SECONDS, "the status names the file")
        assert rclone_tls_bucket.ca_bundle is not None
        shutil.copy(rclone_tls_bucket.ca_bundle, absent)
        agent.wait_committed(save)


def test_without_verification_it_works_and_the_log_warns(rclone_tls_bucket: Bucket, tmp_path: Path) -> None:
    with make_agent(tmp_path / "volume", rclone_tls_bucket, verify_tls=False) as agent:
        original = commit_one(agent)
        (warning,) = agent.log("tls.not_verified")
        assert warning["level"] == "warning"
        assert warning["endpoint"] == rclone_tls_bucket.endpoint_url
    restored = restore(rclone_tls_bucket, tmp_path / "other", "--no-verify-tls")
    assert restored.returncode == 0, restored.stderr
    assert "tls.not_verified" in restored.stderr
    assert tree(tmp_path / "other/checkpoints/checkpoint-7") == original

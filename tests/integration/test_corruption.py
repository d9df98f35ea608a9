"""One byte in the bucket is wrong: verify names the object, restore passes the checkpoint over and says why."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.harness.agent_process import AgentProcess, tree, write_checkpoint
from tests.harness.bounds import HANG_SECONDS
from tests.harness.bucket_view import BucketView, step_of
from tests.servers.server import Bucket

MIB = 1024 * 1024
SIZES = {"model.safetensors": 11 * MIB, "optimizer.pt": 2 * MIB, "config.json": 300}


def keepstep(bucket: Bucket, command: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    line = [sys.executable, "-m", "keepstep_agent", command, bucket.destination]
    line += [f"--endpoint-url={bucket.endpoint_url}", *arguments]
    return subprocess.run(line, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)


@pytest.fixture
def originals(rclone_bucket: Bucket, tmp_path: Path) -> dict[int, dict[str, bytes]]:
    """Steps 10 and 20, committed by a real agent; what they hold."""
    found = {}
    agent = AgentProcess(
        tmp_path / "volume",
        rclone_bucket.destination,
        endpoint_url=rclone_bucket.endpoint_url,
        part_size_bytes="5MiB",
        watch="off",
    )
    with agent:
        for step in (10, 20):
            source = write_checkpoint(agent.checkpoints / f"checkpoint-{step}", SIZES, seed=step)
            found[step] = tree(source)
            agent.wait_committed(agent.announce(source, step).save)
    return found


def only_key(view: BucketView, prefix: str, name: str) -> str:
    (key,) = [key for key in view.keys(prefix) if key.endswith(name)]
    return key


@pytest.mark.parametrize(
    ("name", "position"),
    [("/model.safetensors", 7 * MIB + 3), ("/config.json", 0), ("/manifest-00000-00001.json", 40)],
    ids=["a large file", "a small file", "a manifest"],
)
def test_a_wrong_byte_is_named_and_the_older_checkpoint_is_restored(
    rclone_bucket: Bucket, originals: dict[int, dict[str, bytes]], tmp_path: Path, name: str, position: int
) -> None:
    key = only_key(BucketView(rclone_bucket), "checkpoint-20/", name)
    BucketView(rclone_bucket).flip(key, position)

    verified = keepstep(rclone_bucket, "verify")
    assert verified.returncode == 1, verified.stderr
    assert key in verified.stdout
    everything = keepstep(rclone_bucket, "verify", "--all", "--json")
    assert everything.returncode == 1
    newest, older = json.loads(everything.stdout)["checkpoints"]
    assert (newest["step"], older["step"]) == (20, 10)
    assert {problem["object"] for problem in newest["problems"]} == {key}
    assert older["problems"] == []

    restored = keepstep(rclone_bucket, "restore", f"--volume={tmp_path}/other")
    assert restored.returncode == 0, restored.stderr
    (warning,) = [line for line in restored.stderr.splitlines() if line.startswith("warning: skipped: ")]
    assert key in warning
    assert restored.stdout.startswith("checkpoint-10 (step 10, ")
    assert [path.name for path in (tmp_path / "other/checkpoints").iterdir()] == ["checkpoint-10"]
    assert tree(tmp_path / "other/checkpoints/checkpoint-10") == originals[10]


def test_a_wrong_byte_in_a_marker_is_named_and_the_older_checkpoint_is_restored(
    rclone_bucket: Bucket, originals: dict[int, dict[str, bytes]], tmp_path: Path
) -> None:
    (key,) = [marker for marker in BucketView(rclone_bucket).markers() if step_of(marker) == 20]
    BucketView(rclone_bucket).flip(key, 20)
    verified = keepstep(rclone_bucket, "verify")
    assert verified.returncode == 1
    assert key in verified.stdout
    restored = keepstep(rclone_bucket, "restore", f"--volume={tmp_path}/other")
    assert restored.returncode == 0, restored.stderr
    assert key in restored.stderr
    assert tree(tmp_path / "other/checkpoints/checkpoint-10") == originals[10]


def test_with_every_checkpoint_damaged_restore_fails_and_names_them_all(
    rclone_bucket: Bucket, originals: dict[int, dict[str, bytes]], tmp_path: Path
) -> None:
    keys = [only_key(BucketView(rclone_bucket), f"checkpoint-{step}/", "/optimizer.pt") for step in originals]
    for key in keys:
        BucketView(rclone_bucket).flip(key, MIB)
    restored = keepstep(rclone_bucket, "restore", f"--volume={tmp_path}/other")
    assert restored.returncode == 1, restored.stdout
    assert restored.stderr.splitlines()[-2].startswith("error: ")
    assert restored.stderr.splitlines()[-1].startswith("hint: ")
    for key in keys:
        assert key in restored.stderr
    assert list((tmp_path / "other/checkpoints").iterdir()) == []

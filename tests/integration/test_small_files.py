"""A real agent and many small files: few requests, objects that any tool unpacks, and nothing half after a death."""

import subprocess
from collections import Counter
from pathlib import Path

import pytest
from tests.harness.agent_process import AgentProcess, tree, wait_until, write_checkpoint
from tests.harness.bounds import HANG_SECONDS
from tests.harness.bucket_view import BucketView
from tests.lanes import nightly
from tests.servers.fault_proxy import FaultProxy
from tests.servers.faults import Request
from tests.servers.server import Bucket

KIB = 1024
SMALL = {f"layer-{number % 9}/shard {number:03d}.bin": number * 100 for number in range(300)}
LARGE = {"model.safetensors": 3 * KIB * KIB}


def start_agent(volume: Path, bucket: Bucket, endpoint_url: str = "") -> AgentProcess:
    return AgentProcess(volume, bucket.destination, endpoint_url=endpoint_url or bucket.endpoint_url)


def is_pack(request: Request) -> bool:
    return request.method == "PUT" and "/.keepstep/pack-" in request.path


def accepted_packs(proxy: FaultProxy) -> Counter[str]:
    return Counter(request.path for request in proxy.log if is_pack(request) and request.status == 200)


@pytest.mark.parametrize("server", ["rclone_tls", *nightly("moto", "ceph")])
def test_many_small_files_are_a_few_archives_that_tar_unpacks_and_restore_brings_back(
    server: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket: Bucket = request.getfixturevalue(f"{server}_bucket")
    if bucket.ca_bundle:
        monkeypatch.setenv("KEEPSTEP_S3_CA_BUNDLE", str(bucket.ca_bundle))
    view = BucketView(bucket)
    with start_agent(tmp_path / "volume", bucket) as agent:
        source = write_checkpoint(agent.checkpoints / "checkpoint-1", SMALL | LARGE)
        original = tree(source)
        agent.wait_committed(agent.announce(source, 1).save)
    keys = view.keys("checkpoint-1/")
    packs = [key for key in keys if key.endswith(".tar")]
    assert len(packs) == 2
    assert len(keys) == len(packs) + 2, "the large file and the manifest"
    unpacked = tmp_path / "unpacked"
    unpacked.mkdir()
    for key in packs:
        (tmp_path / "pack.tar").write_bytes(view.read(key))
        subprocess.run(["tar", "-xf", tmp_path / "pack.tar", "-C", unpacked], check=True, timeout=HANG_SECONDS)
    assert tree(unpacked) == {path: body for path, body in original.items() if path in SMALL}
    assert [row["problems"] for row in view.verify()] == [[]]
    assert tree(view.restore(tmp_path / "other")) == original


def test_packs_go_on_after_a_kill_and_those_that_were_stored_are_not_sent_again(
    rclone_bucket: Bucket, fault_proxy: FaultProxy, tmp_path: Path
) -> None:
    files = {f"{number:03d}.bin": 100 * KIB for number in range(400)}
    fault_proxy.throttle(6 * KIB * KIB)
    with start_agent(tmp_path / "volume", rclone_bucket, fault_proxy.endpoint_url) as agent:
        source = write_checkpoint(agent.checkpoints / "checkpoint-1", files)
        original = tree(source)
        save = agent.announce(source, 1).save
        # What the first ones were answered is in the journal once the next are on the wire.
        wait_until(lambda: accepted_packs(fault_proxy).total() >= 3, HANG_SECONDS, "packs arrive")
        agent.kill()
        wait_until(lambda: not fault_proxy.open_connections, HANG_SECONDS, "the dead agent's requests are over")
        before = accepted_packs(fault_proxy)
        fault_proxy.throttle(0)
        agent.start()
        agent.wait_committed(save)
    again = [path for path, count in accepted_packs(fault_proxy).items() if count > 1]
    assert len(accepted_packs(fault_proxy)) == 10
    assert len(again) < len(before)
    view = BucketView(rclone_bucket)
    assert [row["problems"] for row in view.verify()] == [[]]
    assert tree(view.restore(tmp_path / "other")) == original


@pytest.mark.parametrize("change", ["rewritten", "shortened"])
def test_a_small_file_that_is_changed_before_it_is_sent_fails_its_checkpoint_alone(
    change: str, rclone_bucket: Bucket, fault_proxy: FaultProxy, tmp_path: Path
) -> None:
    files = {f"{number:03d}.bin": 100 * KIB for number in range(400)}
    fault_proxy.throttle(KIB * KIB // 2)
    with start_agent(tmp_path / "volume", rclone_bucket, fault_proxy.endpoint_url) as agent:
        source = write_checkpoint(agent.checkpoints / "checkpoint-1", files)
        save = agent.announce(source, 1).save
        wait_until(lambda: any(map(is_pack, fault_proxy.log)), HANG_SECONDS, "the first packs are on the wire")
        # The last pack waits for its turn.
        with (source / "399.bin").open("r+b") as file:
            file.truncate(1000) if change == "shortened" else file.write(b"other bytes")
        fault_proxy.throttle(0)
        wait_until(lambda: bool(agent.log("checkpoint.failed")), HANG_SECONDS, "the checkpoint fails")
        (line,) = agent.log("checkpoint.failed")
        assert (line["save"], line["kind"]) == (save, "file-changed")
        assert "399.bin" in line["reason"]
        good = write_checkpoint(agent.checkpoints / "checkpoint-2", files, seed=2)
        original = tree(good)
        agent.wait_committed(agent.announce(good, 2).save)
    view = BucketView(rclone_bucket)
    assert [(row["step"], row["problems"]) for row in view.verify()] == [(2, [])]
    assert tree(view.restore(tmp_path / "other")) == original

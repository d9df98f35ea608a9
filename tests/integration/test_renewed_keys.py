"""Keys that are replaced while a run uploads: whoever uses them goes on with the next ones, and everything commits."""

from pathlib import Path

import pytest
from tests.harness.agent_process import AgentProcess, tree, wait_until, write_checkpoint
from tests.harness.bounds import HANG_SECONDS
from tests.harness.bucket_view import BucketView
from tests.harness.credentials_file import FIRST_KEYS, NEXT_KEYS, refuse_first_keys, write_credentials
from tests.harness.run_process import RunProcess
from tests.podsim.volumes import write_atomically
from tests.servers.fault_proxy import FaultProxy
from tests.servers.faults import Request
from tests.servers.server import NEXT_ACCESS_KEY, Bucket

MIB = 1024 * 1024


@pytest.fixture
def credentials(rclone_bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file, with the first keys, which are nowhere else."""
    for name in FIRST_KEYS:
        monkeypatch.delenv(name)
    path = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(path))
    write_credentials(path, FIRST_KEYS)
    return path


def test_a_run_whose_credentials_file_is_rewritten_commits_all_and_exits_with_0(
    rclone_bucket: Bucket, fault_proxy: FaultProxy, credentials: Path, tmp_path: Path
) -> None:
    view = BucketView(rclone_bucket)
    trainer = {"EVERY": 20, "STEPS": 400}
    with RunProcess(
        tmp_path / "volume", rclone_bucket.destination, trainer=trainer, endpoint_url=fault_proxy.endpoint_url
    ) as run:
        wait_until(lambda: bool(view.markers()), HANG_SECONDS, "a checkpoint is committed")
        # The store refuses the old keys before the file has the new ones.
        refuse_first_keys(fault_proxy)
        wait_until(lambda: fault_proxy.hits("old") > 0, HANG_SECONDS, "the old keys are refused")
        write_credentials(credentials, NEXT_KEYS)
        assert run.wait() == 0, run.output()[-4000:]
        assert len(run.log("credentials.renewed")) >= 1
    assert max(view.steps()) == 400
    assert [row["problems"] for row in view.verify()] == [[]] * len(view.markers())


def test_an_upload_under_way_goes_on_under_the_next_keys_of_a_secret(
    rclone_bucket: Bucket, fault_proxy: FaultProxy, credentials: Path, tmp_path: Path
) -> None:
    write_atomically(tmp_path / "secret", FIRST_KEYS)
    with AgentProcess(
        tmp_path / "volume",
        rclone_bucket.destination,
        credentials_directory=tmp_path / "secret",
        watch="off",
        endpoint_url=fault_proxy.endpoint_url,
        part_size_bytes="5MiB",
        max_concurrency=2,
    ) as agent:
        path = write_checkpoint(agent.checkpoints / "checkpoint-1", {"model.bin": 33 * MIB})
        original = tree(path)
        fault_proxy.throttle(8 * MIB)
        save = agent.announce(path, 1).save
        wait_until(lambda: bool(_parts(fault_proxy)), HANG_SECONDS, "a part is stored")
        refuse_first_keys(fault_proxy)
        write_atomically(tmp_path / "secret", NEXT_KEYS)
        fault_proxy.throttle(0)
        agent.wait_committed(save)
        assert agent.log("work.failed") == []
    begun = [one for one in fault_proxy.log if one.query == "uploads" and "/model.bin" in one.path]
    assert len(begun) == 1
    assert NEXT_ACCESS_KEY in {request.access_key for request in _parts(fault_proxy)}
    assert tree(BucketView(rclone_bucket).restore(tmp_path / "other")) == original


def _parts(proxy: FaultProxy) -> list[Request]:
    """The parts that are stored."""
    return [one for one in proxy.log if "partNumber=" in one.query and "/model.bin" in one.path and one.status == 200]

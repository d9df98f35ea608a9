"""A checkpoint that is one file is that file again after a restore.

On the same paths: the volume is wiped in between, as where a pod starts anew.
"""

import json
import os
import shutil
from pathlib import Path

import pytest
from tests.harness.agent_process import AgentProcess, wait_until
from tests.harness.bounds import HANG_SECONDS
from tests.harness.bucket_view import BucketView
from tests.harness.warm_python import warm_python
from tests.servers.server import Bucket

from keepstep_api import names

PROGRAM = Path(__file__).with_name("lightning_program.py")


@pytest.mark.parametrize("readers", [["best", ""], ["last"]], ids=["a step", "last"])
def test_lightning_finds_its_file_where_it_was(readers: list[str], rclone_bucket: Bucket, tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    volume, view = tmp_path / "volume", BucketView(rclone_bucket)
    with AgentProcess(volume, rclone_bucket.destination, endpoint_url=rclone_bucket.endpoint_url) as agent:
        assert train(agent, "last" if readers == ["last"] else "", 4)[0] == [1, 2, 3, 4]
        wait_until(lambda: bool(agent.log("checkpoint.committed")), HANG_SECONDS, "it is committed")
    (saved,) = agent.checkpoints.iterdir()
    shutil.rmtree(volume)
    assert view.restore(volume) == saved
    with AgentProcess(volume, rclone_bucket.destination, endpoint_url=rclone_bucket.endpoint_url) as agent:
        for chosen in readers:
            trained, loaded = train(agent, chosen, 4 if chosen == "best" else 6)
            assert trained == ([] if chosen == "best" else [5, 6])
            assert loaded == str(saved)


def train(agent: AgentProcess, chosen: str, steps: int) -> tuple[list[int], str]:
    """The steps that it trained, and the checkpoint that was loaded last."""
    environment = {
        **os.environ,
        names.ENV_VOLUME: str(agent.volume),
        names.ENV_CHECKPOINT_DIRECTORY: str(agent.checkpoints),
    }
    lightning = warm_python("torch", "lightning.pytorch")
    words = [str(PROGRAM), chosen, str(steps)]
    result = lightning.run(words, environment=environment, timeout_seconds=HANG_SECONDS)
    assert result.returncode == 0, result.stderr
    trained, loaded = json.loads(result.stdout.splitlines()[-1])
    return trained, loaded

"""The least memory that the injection lets an agent have is enough as the kernel counts it, page cache too."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.harness.agent_process import AgentProcess, tree, write_checkpoint
from tests.harness.bounds import HANG_SECONDS
from tests.harness.control_group import ControlGroup, NoControlGroup, memory_control_group
from tests.servers.server import Bucket

from keepstep_agent.core.injection.annotation_table import LEAST_MEMORY
from keepstep_agent.core.injection.pod import parse_quantity

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(1200)]

MB = 10**6


@pytest.fixture
def least_memory() -> Iterator[ControlGroup]:
    try:
        with memory_control_group(int(parse_quantity(LEAST_MEMORY))) as group:
            yield group
    except NoControlGroup as reason:
        pytest.skip(str(reason))


def test_with_the_least_memory_checkpoints_are_uploaded_and_restored_without_a_kill(
    least_memory: ControlGroup, rclone_tls_bucket: Bucket, tmp_path: Path
) -> None:
    volume, again = tmp_path / "volume", tmp_path / "again"
    tls: dict[str, Any] = {"endpoint_url": rclone_tls_bucket.endpoint_url, "ca_bundle": rclone_tls_bucket.ca_bundle}
    agent = AgentProcess(volume, rclone_tls_bucket.destination, warm=False, **tls)

    def runs(*command: str) -> None:
        """As kubelet runs a hook, and restore: where the agent's limit counts."""
        wrapped = least_memory.wrap([sys.executable, "-m", "keepstep_agent", *command])
        said = subprocess.run(wrapped, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)
        assert said.returncode == 0, (said.returncode, said.stderr, least_memory.out_of_memory_kills())

    with least_memory.inside():
        agent.start(wait=False)
    try:
        agent.wait_serving()
        for step in (1, 2, 3):
            checkpoint = write_checkpoint(agent.checkpoints / f"checkpoint-{step}", {"model": 60 * MB}, seed=step)
            agent.wait_committed(agent.announce(checkpoint, step).save, HANG_SECONDS)
        # At last one of so many parts that all of the wire is used, and the hook's process beside it.
        shards = {f"shard-{number}": 60 * MB for number in range(5)}
        checkpoint = write_checkpoint(agent.checkpoints / "checkpoint-4", shards)
        save = agent.announce(checkpoint, 4).save
        runs("terminating", f"--socket={agent.socket}", f"--grace-seconds={HANG_SECONDS}")
        agent.wait_committed(save, HANG_SECONDS)
    finally:
        agent.kill()
    said = [f"--{name.replace('_', '-')}={value}" for name, value in tls.items()]
    runs("restore", rclone_tls_bucket.destination, f"--volume={again}", *said)
    assert tree(again / "checkpoints/checkpoint-4") == tree(checkpoint)
    assert least_memory.out_of_memory_kills() == 0

"""Trainer and agent as two real containers: users, memory, signals, and a store across the network."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.containers.container import Container
from tests.containers.engine import Engine
from tests.containers.pod import Pod
from tests.harness.agent_process import tree, wait_until
from tests.harness.bucket_view import BucketView
from tests.servers.fault_proxy import FaultProxy
from tests.servers.server import Bucket

pytestmark = [pytest.mark.containers, pytest.mark.timeout(2400)]

MIB = 1024 * 1024
WAIT_SECONDS = 180.0
USER = "1000:1000"
MEMORY_BYTES = 256 * MIB
# More than the agent's limit: the kernel kills the one it is told to, which is the agent.
EATER = "import os; open('/proc/self/oom_score_adj'); eaten = bytearray(os.urandom(1 << 20)) * 1024"


@pytest.fixture
def pod(engine: Engine, tmp_path: Path, rclone_bucket: Bucket) -> Pod:
    return Pod(engine, tmp_path / "pod", rclone_bucket)


def ready(agent: Container) -> None:
    """The startup probe, as kubelet asks."""

    def answers() -> bool:
        assert agent.state()["Running"], agent.said()
        try:
            agent.call("mooring", "ready")
        except AssertionError:
            return False
        return True

    wait_until(answers, WAIT_SECONDS, "the agent answers on its socket")


def committed(agent: Container) -> list[int]:
    return [line["step"] for line in agent.log("checkpoint.committed")]


def link_refusals(agent: Container) -> int:
    return len(agent.log("hard_link_refused"))


def test_trainer_and_agent_of_one_user_link_and_another_pod_restores_every_byte(
    engine: Engine, pod: Pod, rclone_bucket: Bucket, tmp_path: Path
) -> None:
    with pod.agent(USER) as agent:
        ready(agent)
        with pod.trainer(USER, steps=4, every=2, save_bytes=11 * MIB) as trainer:
            assert trainer.wait() == 0, trainer.said()
            assert "done 4" in trainer.said()
        wait_until(lambda: 4 in committed(agent), WAIT_SECONDS, "the final step is committed")
        assert link_refusals(agent) == 0
        agent.signal("TERM")
        assert agent.wait() == 0, agent.said()
    assert [row["problems"] for row in BucketView(rclone_bucket).verify()][-1] == []

    other = Pod(engine, tmp_path / "other", rclone_bucket)
    with other.restore(USER) as restore:
        assert restore.wait() == 0, restore.said()
    name = "checkpoints/checkpoint-4"
    assert tree(other.volume / name) == tree(pod.volume / name)
    with other.trainer(USER, steps=4, every=2, save_bytes=1) as trainer:
        assert trainer.wait() == 0, trainer.said()
        assert "begin 4" in trainer.said()


@pytest.mark.parametrize("trainers_user", ["2000:1000", "2000:2000"], ids=["same-group", "stranger"])
def test_an_agent_of_another_user_copies_and_says_so(
    pod: Pod, rclone_bucket: Bucket, trainers_user: str
) -> None:
    with pod.restore(USER) as restore:
        assert restore.wait() == 0, restore.said()
    with pod.agent(USER) as agent:
        ready(agent)
        with pod.trainer(trainers_user, steps=4, every=2, save_bytes=11 * MIB) as trainer:
            assert trainer.wait() == 0, trainer.said()
            assert "done 4" in trainer.said()
        wait_until(lambda: 4 in committed(agent), WAIT_SECONDS, "the final step is committed")
        assert link_refusals(agent) == 1, agent.said()
        assert agent.log("hard_link_refused")[0]["fallback"] == "reflink"
    assert [row["problems"] for row in BucketView(rclone_bucket).verify()][-1] == []

"""Trainer and agent as two real containers: users, memory, signals, and a store across the network."""

import signal
import subprocess
from pathlib import Path

import pytest
from tests.containers.container import Container
from tests.containers.engine import Engine
from tests.containers.pod import Pod
from tests.harness.agent_process import tree, wait_until
from tests.harness.bounds import HANG_SECONDS
from tests.harness.bucket_view import BucketView
from tests.integration.test_crash import sent_twice
from tests.servers.fault_proxy import FaultProxy
from tests.servers.server import Bucket

pytestmark = [pytest.mark.containers, pytest.mark.timeout(2400)]

MIB = 1024 * 1024
USER, OTHER_USER, FOREIGN_USER = "1000:1000", "2000:1000", "2000:2000"
MEMORY_BYTES = 256 * MIB
# Four times the agent's limit, by a process beside it.
EAT = f"eaten = bytearray(b'x') * {4 * MEMORY_BYTES}"


@pytest.fixture
def pod(engine: Engine, tmp_path: Path, rclone_bucket: Bucket) -> Pod:
    return Pod(engine, tmp_path / "pod", rclone_bucket)


def ready(agent: Container) -> None:
    """The startup probe, as kubelet asks."""

    def answers() -> bool:
        assert agent.state()["Running"], agent.said()
        try:
            agent.call("keepstep", "ready")
        except AssertionError:
            return False
        return True

    wait_until(answers, HANG_SECONDS, "the agent answers on its socket")


def committed(agent: Container) -> list[int]:
    return [line["step"] for line in agent.log("checkpoint.committed")]


def test_trainer_and_agent_of_one_user_link_and_another_pod_restores_every_byte(
    engine: Engine, pod: Pod, rclone_bucket: Bucket, tmp_path: Path
) -> None:
    with pod.agent(USER) as agent:
        ready(agent)
        with pod.trainer(USER, steps=4, every=2, save_bytes=11 * MIB) as trainer:
            assert trainer.wait() == 0, trainer.said()
            assert "done 4" in trainer.said()
        wait_until(lambda: 4 in committed(agent), HANG_SECONDS, "the final step is committed")
        assert agent.log("hard_link_refused") == []
        agent.signal("TERM")
        assert agent.wait() == 0, agent.said()
    assert BucketView(rclone_bucket).verify()[-1]["problems"] == []

    other = Pod(engine, tmp_path / "other", rclone_bucket)
    with other.restore(USER) as restore:
        assert restore.wait() == 0, restore.said()
    name = "checkpoints/checkpoint-4"
    assert tree(other.volume / name) == tree(pod.volume / name)
    with other.trainer(USER, steps=4, every=2, save_bytes=1) as trainer:
        assert trainer.wait() == 0, trainer.said()
        assert "begin 4" in trainer.said()


def test_an_agent_of_another_user_in_the_trainers_group_copies_and_says_so(
    engine: Engine, pod: Pod, rclone_bucket: Bucket, tmp_path: Path
) -> None:
    with pod.agent(USER) as agent:
        ready(agent)
        with pod.trainer(OTHER_USER, steps=4, every=2, save_bytes=11 * MIB) as trainer:
            assert trainer.wait() == 0, trainer.said()
            assert "done 4" in trainer.said()
        wait_until(lambda: 4 in committed(agent), HANG_SECONDS, "the final step is committed")
        (refusal,) = agent.log("hard_link_refused")
        assert refusal["fallback"] == "reflink"
        assert all(staged["copied"] == staged["files"] for staged in agent.log("checkpoint.staged"))
    assert BucketView(rclone_bucket).verify()[-1]["problems"] == []

    # What restore brings is the agent's user's, and still the trainer's to remove when it has saved something newer.
    other = Pod(engine, tmp_path / "other", rclone_bucket)
    with other.restore(USER) as restore:
        assert restore.wait() == 0, restore.said()
    with other.agent(USER) as agent:
        ready(agent)
        with other.trainer(OTHER_USER, steps=5, every=0, save_bytes=1) as trainer:
            assert trainer.wait() == 0, trainer.said()
            assert "begin 4" in trainer.said()
    assert [path.name for path in (other.volume / "checkpoints").iterdir()] == ["checkpoint-5"]


def test_beside_an_agent_of_a_foreign_user_and_group_training_goes_on_and_the_agent_says_what_it_needs(
    pod: Pod, rclone_bucket: Bucket
) -> None:
    with pod.agent(USER) as agent:
        ready(agent)
        with pod.trainer(FOREIGN_USER, steps=4, every=2, save_bytes=MIB) as trainer:
            assert trainer.wait() == 0, trainer.said()
            assert "done 4" in trainer.said()
        wait_until(lambda: bool(agent.log("ranks.unknown")), HANG_SECONDS, "the agent says what is wrong")
        assert "give the agent the trainer's UID or GID" in agent.log("ranks.unknown")[0]["hint"]
    assert BucketView(rclone_bucket).markers() == []


def test_an_agent_that_the_kernel_kills_for_its_memory_goes_on_in_the_same_upload(
    engine: Engine, tmp_path: Path, rclone_bucket: Bucket, fault_proxy: FaultProxy
) -> None:
    view = BucketView(rclone_bucket)
    pod = Pod(engine, tmp_path / "pod", rclone_bucket, endpoint_url=fault_proxy.endpoint_url)
    fault_proxy.throttle(2 * MIB)
    limits = (f"--memory={MEMORY_BYTES}", f"--memory-swap={MEMORY_BYTES}")
    with pod.agent(USER, *limits) as agent:
        ready(agent)
        with pod.trainer(USER, steps=1, every=0, save_bytes=60 * MIB) as trainer:
            assert trainer.wait() == 0, trainer.said()
        wait_until(lambda: parts_stored(fault_proxy) >= 2, HANG_SECONDS, "some parts are stored")
        # However late the kill is, most of it is yet to come.
        fault_proxy.throttle(MIB // 8)
        # Of two processes in a cgroup without memory the kernel takes the one with the higher score.
        Path(f"/proc/{agent.state()['Pid']}/oom_score_adj").write_text("1000")
        before = memory_kills()
        subprocess.run(agent.call_command("python", "-c", EAT), capture_output=True, timeout=HANG_SECONDS, check=False)
        assert agent.wait() == 128 + signal.SIGKILL, agent.said()
        assert memory_kills() > before
        assert view.markers() == [], "it was committed before the kill"

        fault_proxy.throttle(0)
        agent.start()
        wait_until(lambda: committed(agent) == [1], HANG_SECONDS, "the restarted agent commits it")
    assert sent_twice(fault_proxy.log) == []
    assert view.uploads() == []
    assert [row["problems"] for row in view.verify()] == [[]]


def test_a_trainer_that_is_terminated_saves_just_in_time_and_the_next_pod_goes_on_there(
    engine: Engine, pod: Pod, rclone_bucket: Bucket, tmp_path: Path
) -> None:
    with pod.agent(USER) as agent:
        ready(agent)
        with pod.trainer(USER, steps=1_000_000, every=0, save_bytes=11 * MIB, step_seconds=0.05) as trainer:
            trainer.wait_said("begin 0")
            # As kubelet ends a pod: SIGTERM and the sidecar's preStop at once, its SIGTERM after the trainer's end.
            trainer.signal("TERM")
            agent.call("keepstep", "terminating")
            assert trainer.wait() == 128 + signal.SIGTERM, trainer.said()
        agent.signal("TERM")
        assert agent.wait() == 0, agent.said()
        (saved,) = agent.log("checkpoint.committed")
        (announced,) = agent.log("checkpoint.announced")
    assert announced["kind"] == "just-in-time"
    (stored,) = BucketView(rclone_bucket).verify()
    assert stored["problems"] == []
    assert stored["step"] == saved["step"]

    other = Pod(engine, tmp_path / "other", rclone_bucket)
    with other.restore(USER) as restore:
        assert restore.wait() == 0, restore.said()
    with other.trainer(USER, steps=saved["step"] + 1, every=0, save_bytes=1) as trainer:
        assert trainer.wait() == 0, trainer.said()
        assert f"begin {saved['step']}" in trainer.said()


def parts_stored(proxy: FaultProxy) -> int:
    stored = (request for request in proxy.log if request.method == "PUT" and request.status == 200)
    return sum("partNumber=" in request.query for request in stored)


def memory_kills() -> int:
    """Of this machine so far; what podman says of them is wrong on some."""
    counters = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
    return int(counters["oom_kill"])

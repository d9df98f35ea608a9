"""Lazy restore with real pods: the ranks decide after they have met, and read from the store what they need."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.harness.agent_process import wait_until
from tests.harness.bounds import HANG_SECONDS
from tests.harness.bucket_view import BucketView
from tests.servers.fault_proxy import FaultProxy
from tests.servers.faults import Fault, Rule
from tests.servers.server import Bucket
from tests.torch_loop.pods import Pods

pytest.importorskip("torch", reason="PyTorch has no wheel for this Python here")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

MODEL = (3, 1536)
"""Layers and width: 56 MiB of weights and momentum, in tensors that are larger than several parts."""

Job = Callable[[int, str], Pods]


@pytest.fixture
def job(rclone_bucket: Bucket, fault_proxy: FaultProxy, short_directory: Path) -> Job:
    """Makes jobs of so many pods, with the folder of their volumes; all have one destination."""

    def make(count: int, folder: str) -> Pods:
        (short_directory / folder).mkdir(exist_ok=True)
        return Pods(short_directory / folder, count, rclone_bucket.destination, fault_proxy)

    return make


def digests(pods: Pods) -> list[str]:
    """What rank 0 had after its resume, and at its end."""
    return pods.pods[0].says("has")


@pytest.mark.parametrize(
    ("count", "most"), [(4, 1.1), (2, 1.1), (8, 1.7)], ids=["same number", "half as many", "twice as many"]
)
def test_pods_without_volumes_read_what_they_need_and_go_on_bit_identical(count: int, most: float, job: Job) -> None:
    """Twice as many ranks need half of each tensor; with its parts of 5 MiB, a bit more of them is read."""
    model = (1, 5120) if count == 8 else MODEL
    with job(4, "first") as first:
        assert first.train(*model, 1) == ["0"] * 4
        stored_bytes = first.stored_bytes()
        at_the_end = digests(first)[-1]
    with job(count, "second") as second:
        second.proxy.log.clear()
        assert second.train(*model, 1) == ["1"] * count
        assert digests(second)[0] == at_the_end
        read_bytes = second.read_bytes()
    assert stored_bytes / 2 < read_bytes <= most * stored_bytes, f"read {read_bytes / stored_bytes:.2f} times"


def test_a_pod_is_replaced_and_the_healthy_ones_fetch_nothing(job: Job) -> None:
    """And so it is if the replacement is evicted while it restores, which ends the other ranks too."""
    with job(4, "pods") as pods:
        pods.train(*MODEL, 2)
        replaced = pods.pods[2]
        replaced.replace()
        pods.proxy.log.clear()
        pods.proxy.add(Rule(name="slow", fault=Fault.BLACKHOLE, method="GET", target="__2_0.distcp", times=-1))
        pods.start(*MODEL, 3)
        wait_until(lambda: pods.proxy.hits("slow") > 0, HANG_SECONDS, "it restores")
        replaced.end_trainer()
        assert 0 not in [pod.wait_trainer() for pod in pods.pods]
        pods.proxy.clear()
        replaced.replace()
        assert pods.train(*MODEL, 3) == ["2"] * 4
        assert [pods.read_bytes(pod) for pod in pods.pods if pod is not replaced] == [0] * 3
        # What it has asked for before its eviction, too.
        assert 0 < pods.read_bytes(replaced) <= 2.5 * pods.stored_bytes() / 4


def test_containers_that_are_restarted_in_place_go_on_from_the_newest_step(job: Job) -> None:
    with job(2, "pods") as pods:
        pods.train(*MODEL, 2)
        pods.start(*MODEL, 10**9)
        for pod in pods.pods:
            pod.kill_trainer()
            pod.agent.kill()
        for pod in pods.pods:
            pod.agent.start()
        pods.proxy.log.clear()
        assert pods.train(*MODEL, 3) == ["2"] * 2
        assert pods.read_bytes() == 0


def test_a_checkpoint_that_one_pod_finds_damaged_is_left_by_all(job: Job, rclone_bucket: Bucket) -> None:
    with job(2, "first") as first:
        first.train(*MODEL, 2)
        before = digests(first)[-1]
        first.train(*MODEL, 3)
    view = BucketView(rclone_bucket)
    (damaged,) = [key for key in view.keys("checkpoint-3/") if key.endswith("__1_0.distcp")]
    view.flip(damaged, 1000)
    with job(2, "second") as second:
        assert second.train(*MODEL, 4) == ["2"] * 2
        assert digests(second)[0] == before
        assert "resuming from another checkpoint" in second.pods[0].output()


def test_a_tensor_whose_elements_are_not_in_order_is_read_whole(job: Job) -> None:
    with job(2, "first") as first:
        first.train(1, 1024, 2, 4096)
        at_the_end = digests(first)[-1]
    with job(4, "second") as second:
        assert second.train(1, 1024, 2, 4096) == ["2"] * 4
        assert digests(second)[0] == at_the_end


def test_cuts_and_a_killed_agent_in_the_middle_only_take_longer(job: Job) -> None:
    with job(2, "first") as first:
        first.train(*MODEL, 2)
        at_the_end = digests(first)[-1]
    with job(2, "second") as second:
        second.proxy.add(Rule(name="cut", fault=Fault.RESET_RESPONSE, target=".distcp", times=4, after_bytes=100_000))
        second.proxy.add(Rule(name="flip", fault=Fault.FLIP_RESPONSE, target=".distcp", times=1, after_bytes=1_000))
        second.proxy.add(Rule(name="hang", fault=Fault.BLACKHOLE, method="GET", target=".distcp", times=1))
        second.start(*MODEL, 2)
        wait_until(lambda: bool(second.proxy.hits("hang")), HANG_SECONDS, "a request hangs")
        for pod in second.pods:
            pod.agent.kill()
            pod.agent.start()
        assert second.finish() == ["2"] * 2
        assert digests(second)[0] == at_the_end

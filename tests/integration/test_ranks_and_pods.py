"""Ranks of one pod share a directory, and pods a bucket: a checkpoint is that of all ranks, or there is none."""

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
import pytest
from tests.harness.agent_process import AgentProcess, tree, wait_until, write_checkpoint
from tests.harness.bounds import HANG_SECONDS
from tests.harness.bucket_view import BucketView
from tests.harness.trainer_process import TrainerProcess
from tests.lanes import nightly
from tests.servers.fault_proxy import FaultProxy
from tests.servers.faults import Fault, Request, Rule
from tests.servers.server import Bucket

from keepstep_agent.core.stored.object_layout import check_token
from keepstep_api.names import AGENT_STATE_DIRECTORY, JOURNAL, STATE_DIRECTORY
from keepstep_api.v1 import agent_pb2

MIB = 1024 * 1024
PART_BYTES = 5 * MIB
JUST_IN_TIME = agent_pb2.KIND_JUST_IN_TIME


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """An agent with a volume and a line to the store of its own, and the ranks that announce to it."""

    agent: AgentProcess
    proxy: FaultProxy
    ranks: tuple[int, ...]
    world_size: int

    def write(self, step: int) -> Path:
        """What its ranks write into one directory, as DCP does."""
        sizes = {f"__{rank}_0.distcp": 6 * MIB + rank for rank in self.ranks}
        sizes |= {".metadata": 500} if 0 in self.ranks else {}
        return write_checkpoint(self.agent.checkpoints / f"checkpoint-{step}", sizes, seed=step)

    def announce(
        self, step: int, ranks: Sequence[int] | None = None, kind: agent_pb2.Kind = agent_pb2.KIND_PERIODIC
    ) -> None:
        for rank in self.ranks if ranks is None else ranks:
            self.agent.announce(
                self.agent.checkpoints / f"checkpoint-{step}",
                step,
                kind=kind,
                save=save_of(step),
                rank=rank,
                world_size=self.world_size,
                local_world_size=len(self.ranks),
            )

    def phase(self, step: int) -> agent_pb2.Phase:
        return next(one.phase for one in self.agent.status().checkpoints if one.save == save_of(step))

    def restore(self, view: BucketView, tmp_path: Path) -> Path:
        """What this pod would start from on a new volume."""
        return view.restore(tmp_path / f"restored-by-{self.ranks[0]}")


def save_of(step: int) -> str:
    return check_token(f"attempt-c{step:06d}", "save id")


MakePods = Callable[..., list[Pod]]


@pytest.fixture
def make_pods(rclone_bucket: Bucket, tmp_path: Path) -> Iterator[MakePods]:
    """Pods with these ranks each; their agents run."""
    port = urlsplit(rclone_bucket.endpoint_url).port
    assert port is not None
    with ExitStack() as stack:

        def make(*ranks_of_pods: tuple[int, ...], **settings: Any) -> list[Pod]:
            pods = []
            for index, ranks in enumerate(ranks_of_pods):
                proxy = FaultProxy(port)
                proxy.start()
                stack.callback(proxy.stop)
                agent = AgentProcess(
                    tmp_path / f"volume-{index}",
                    rclone_bucket.destination,
                    endpoint_url=proxy.endpoint_url,
                    **{"part_size_bytes": PART_BYTES, "watch": "off", **settings},
                )
                world_size = sum(map(len, ranks_of_pods))
                pods.append(Pod(agent=stack.enter_context(agent), proxy=proxy, ranks=ranks, world_size=world_size))
            return pods

        yield make


def has_markers(view: BucketView, count: int) -> bool:
    return len(view.markers()) == count


def seen(pod: Pod, happens: Callable[[Request], bool]) -> bool:
    return any(map(happens, pod.proxy.log))


MOMENTS: dict[str, Callable[[Request], bool]] = {
    "an upload begins": lambda request: request.method == "POST" and request.query.startswith("uploads"),
    "a part is sent": lambda request: request.method == "PUT" and "partNumber=2" in request.query,
    "a file is completed": lambda request: request.method == "POST" and "uploadId=" in request.query,
    "the manifest": lambda request: request.method == "PUT" and "/.keepstep/manifest-" in request.path,
    "the marker": lambda request: request.method == "PUT" and "/.keepstep/commits/" in request.path,
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("journal", ["kept", "lost"])
def test_a_directory_of_two_ranks_survives_the_agents_death_at_every_step_of_its_way(
    make_pods: MakePods, rclone_bucket: Bucket, tmp_path: Path, journal: str
) -> None:
    (pod,) = make_pods((0, 1))
    view = BucketView(rclone_bucket)

    def die_and_restart() -> None:
        pod.agent.kill()
        wait_until(lambda: not pod.proxy.open_connections, HANG_SECONDS, "the dead agent's requests are over")
        pod.proxy.clear()
        if journal == "lost":
            for path in (pod.agent.volume / STATE_DIRECTORY / AGENT_STATE_DIRECTORY).glob(f"{JOURNAL}*"):
                path.unlink()
        pod.agent.start()

    for step, (moment, happens) in enumerate(MOMENTS.items(), start=1):
        # Nothing is lost between the announcements, except with the journal: then a rank must ask again.
        directory = pod.write(step)
        pod.announce(step, [1])
        die_and_restart()
        pod.announce(step, [0] if journal == "kept" else [1, 0])
        # What was announced may be rotated.
        original = tree(directory)
        for path in directory.iterdir():
            path.unlink()
        directory.rmdir()
        wait_until(partial(seen, pod, happens), HANG_SECONDS, moment)
        die_and_restart()
        if journal == "kept":
            pod.agent.wait_committed(save_of(step))
        else:
            # Without a journal, an agent does not know what was committed and released before its start.
            wait_until(partial(has_markers, view, step), HANG_SECONDS, moment)
        pod.proxy.log.clear()
        assert tree(view.restore(tmp_path / f"restored-{step}")) == original, moment
        wait_until(
            lambda: not any((pod.agent.volume / STATE_DIRECTORY / "staged").iterdir()), HANG_SECONDS, "no pin is left"
        )
    assert [row["problems"] for row in view.verify()] == [[]] * len(MOMENTS)
    assert view.uploads() == []


@pytest.mark.parametrize("order", [(1, 2, 0), *nightly((0, 1, 2), (2, 1, 0))], ids=str)
def test_ranks_may_announce_in_any_order_and_twice(
    make_pods: MakePods, rclone_bucket: Bucket, tmp_path: Path, order: tuple[int, ...]
) -> None:
    (pod,) = make_pods((0, 1, 2))
    original = tree(pod.write(1))
    for rank in order:
        pod.announce(1, [rank, order[0], rank])
    pod.agent.wait_committed(save_of(1))
    pod.announce(1)
    view = BucketView(rclone_bucket)
    assert [row["problems"] for row in view.verify()] == [[]]
    assert tree(pod.restore(view, tmp_path)) == original


def test_a_save_that_one_local_rank_never_announced_is_not_committed_and_the_next_one_is(
    make_pods: MakePods, rclone_bucket: Bucket, tmp_path: Path
) -> None:
    (pod,) = make_pods((0, 1))
    pod.write(1)
    pod.announce(1, [0])
    # The job was restarted, and goes on.
    original = tree(pod.write(2))
    pod.announce(2)
    pod.agent.wait_committed(save_of(2))
    assert pod.phase(1) == agent_pb2.PHASE_ANNOUNCED
    view = BucketView(rclone_bucket)
    assert not any(save_of(1) in key for key in view.keys(""))
    assert tree(pod.restore(view, tmp_path)) == original


def test_a_local_rank_that_dies_before_its_last_save_does_not_hold_the_agent_up(
    make_pods: MakePods, rclone_bucket: Bucket, tmp_path: Path
) -> None:
    # Longer than the test waits for it.
    (pod,) = make_pods((0, 1), grace_seconds=3600)
    agent = pod.agent
    with TrainerProcess(agent.volume), TrainerProcess(agent.volume, local_rank=1) as killed:
        for local_rank, rank in enumerate(pod.ranks):
            agent.register(local_rank=local_rank, rank=rank, world_size=pod.world_size)
        # It is on its way when the end comes.
        pod.proxy.add(Rule(name="held", fault=Fault.DELAY, method="PUT", target="partNumber=2", seconds=3.0))
        original = tree(pod.write(1))
        pod.announce(1)
        agent.notify_termination()
        agent.terminate()
        pod.write(2)
        pod.announce(2, [0], kind=JUST_IN_TIME)
        assert agent.process.poll() is None, "it did not wait for rank 1"
        killed.die()
        # Rank 0 lives on; it may well wait for rank 1.
        assert agent.wait(HANG_SECONDS) == 75, agent.log_text()
    assert "keepstep: not durable: checkpoint-2 (step 2, just-in-time) is announced" in agent.log_text()
    view = BucketView(rclone_bucket)
    assert view.steps() == [1]
    assert tree(pod.restore(view, tmp_path)) == original


def test_the_end_waits_for_the_rank_that_is_missing_and_not_for_a_number_of_them(make_pods: MakePods) -> None:
    (pod,) = make_pods((0, 1), grace_seconds=3600)
    agent = pod.agent
    with TrainerProcess(agent.volume) as first, TrainerProcess(agent.volume, local_rank=1):
        # Not in the order of their local ranks, as another launcher than torchrun may have it.
        agent.register(local_rank=0, rank=1, world_size=2)
        agent.register(local_rank=1, rank=0, world_size=2)
        agent.notify_termination()
        agent.terminate()
        pod.write(1)
        pod.announce(1, [1], kind=JUST_IN_TIME)
        # Who it is must outlive the agent, for nobody registers again in the midst of a save.
        agent.kill()
        agent.start()
        agent.terminate()
        first.die()
        wait_until(lambda: agent.status().live_ranks == 1, HANG_SECONDS, "the agent sees that rank 1 is gone")
        assert agent.process.poll() is None, "it did not wait for rank 0"
        pod.announce(1, [0], kind=JUST_IN_TIME)
        assert agent.wait(HANG_SECONDS) == 0, agent.log_text()


@pytest.mark.parametrize("last", [0, *nightly(1)])
def test_two_pods_of_two_ranks_commit_when_both_have_sealed_and_not_before(
    make_pods: MakePods, rclone_bucket: Bucket, tmp_path: Path, last: int
) -> None:
    pods = make_pods((0, 1), (2, 3))
    view = BucketView(rclone_bucket)
    held, free = pods[last], pods[1 - last]
    originals = [tree(pod.write(1)) for pod in pods]
    # All but its manifest.
    held.proxy.add(Rule(name="held", fault=Fault.STATUS, method="PUT", target="/.keepstep/manifest-", times=-1))
    for pod in pods:
        pod.announce(1)
    wait_until(lambda: free.phase(1) == agent_pb2.PHASE_SEALED, HANG_SECONDS, "one pod has sealed")
    wait_until(lambda: held.proxy.hits("held") > 2, HANG_SECONDS, "the other one tries")
    assert view.markers() == []
    # Longer than a pod leaves to the one that has rank 0.
    with pytest.raises(grpc.RpcError) as waiting:
        free.agent.wait_committed(save_of(1), timeout_seconds=6.0)
    assert waiting.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert view.markers() == []
    held.proxy.clear()
    for pod in pods:
        pod.agent.wait_committed(save_of(1))
    assert len(view.markers()) == 1
    assert [row["problems"] for row in view.verify()] == [[]]
    # Both pods get everything: which rank reads what is the framework's business.
    for pod in pods:
        assert tree(pod.restore(view, tmp_path)) == originals[0] | originals[1]


@pytest.mark.parametrize("moment", ["before it sealed", *nightly("before it announced", "between its ranks")])
def test_when_one_pod_is_killed_before_it_sealed_both_restore_the_checkpoint_before(
    make_pods: MakePods, rclone_bucket: Bucket, tmp_path: Path, moment: str
) -> None:
    # To its end the survivor stays: the other one might yet seal.
    pods = make_pods((0, 1), (2, 3), grace_seconds=6)
    survivor, killed = pods
    view = BucketView(rclone_bucket)
    originals = [tree(pod.write(1)) for pod in pods]
    for pod in pods:
        pod.announce(1)
    for pod in pods:
        pod.agent.wait_committed(save_of(1))
    for pod in pods:
        pod.write(2)
    survivor.announce(2)
    match moment:
        case "between its ranks":
            killed.announce(2, [3])
        case "before it sealed":
            killed.proxy.add(
                Rule(name="held", fault=Fault.BLACKHOLE, method="PUT", target="/.keepstep/manifest-", times=-1)
            )
            killed.announce(2)
            wait_until(lambda: killed.proxy.hits("held") > 0, HANG_SECONDS, "its manifest is on the way")
    killed.agent.kill()
    wait_until(lambda: survivor.phase(2) == agent_pb2.PHASE_SEALED, HANG_SECONDS, "the other pod has sealed")
    survivor.agent.terminate()
    assert survivor.agent.wait(HANG_SECONDS) == 75, survivor.agent.log_text()
    assert len(view.markers()) == 1
    for pod in pods:
        restored = pod.restore(view, tmp_path)
        assert restored.name == "checkpoint-1"
        assert tree(restored) == originals[0] | originals[1]


def part_sizes(view: BucketView, path: str) -> list[int]:
    """Of this file in the manifests of the second step's save, by rank."""
    keys = sorted(view.keys(f"checkpoint-2/{save_of(2)}/.keepstep/manifest-"))
    ranks = [rank for key in keys for rank in json.loads(view.read(key))["ranks"]]
    files = [file for rank in ranks for file in rank["files"]]
    return [file["part_size"] for file in files if file["path"] == path]


def upload_slowly(pod: Pod) -> None:
    """A save of its own that tells this pod that its wire is slow."""
    pod.proxy.throttle(2 * MIB)
    path = write_checkpoint(pod.agent.checkpoints / "checkpoint-1", {"model.bin": 8 * MIB})
    pod.agent.wait_committed(pod.agent.announce(path, 1).save)
    pod.proxy.throttle(0)


@pytest.mark.nightly
def test_pods_whose_wires_suit_different_parts_may_bring_the_same_file(
    make_pods: MakePods, rclone_bucket: Bucket, tmp_path: Path
) -> None:
    pods = make_pods((0,), (1,), part_size_bytes=16 * MIB)
    view = BucketView(rclone_bucket)
    upload_slowly(pods[0])
    shared = write_checkpoint(tmp_path / "shared", {"config.json": 100, "tokenizer.bin": 20 * MIB})
    originals: dict[str, bytes] = {}
    for pod in pods:
        originals |= tree(shutil.copytree(shared, pod.write(2), dirs_exist_ok=True))
    for pod in pods:
        pod.announce(2)
    for pod in pods:
        pod.agent.wait_committed(save_of(2))
    assert part_sizes(view, "tokenizer.bin") == [8 * MIB, 16 * MIB]
    assert [row["problems"] for row in view.verify()] == [[], []]
    assert tree(pods[0].restore(view, tmp_path)) == originals


@pytest.mark.nightly
def test_ranks_of_one_pod_that_are_staged_before_and_after_its_wire_got_slow_may_bring_the_same_file(
    make_pods: MakePods, rclone_bucket: Bucket, tmp_path: Path
) -> None:
    (pod,) = make_pods((0, 1), part_size_bytes=16 * MIB)
    view = BucketView(rclone_bucket)
    path = write_checkpoint(pod.agent.checkpoints / "checkpoint-2", {"0.bin": 100, "1.bin": 100, "both.bin": 20 * MIB})
    for rank in pod.ranks:
        files = [f"{rank}.bin", "both.bin"]
        pod.agent.announce(path, 2, save=save_of(2), rank=rank, world_size=2, files=files)
        if rank == 0:
            upload_slowly(pod)
    pod.agent.wait_committed(save_of(2))
    assert part_sizes(view, "both.bin") == [16 * MIB, 8 * MIB]
    assert [row["problems"] for row in view.verify()] == [[], []]
    assert tree(pod.restore(view, tmp_path)) == tree(path)

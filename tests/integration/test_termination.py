"""The pod ends: what the agent gets out, in which order, what it says of the rest, and when it leaves."""

import itertools
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.harness.agent_process import AgentProcess, wait_until, write_checkpoint
from tests.harness.bounds import HANG_SECONDS
from tests.harness.bucket_view import BucketView
from tests.harness.trainer_process import TrainerProcess
from tests.lanes import nightly
from tests.servers.fault_proxy import FaultProxy
from tests.servers.faults import Fault, Rule
from tests.servers.server import Bucket

from keepstep_api.v1 import agent_pb2

MIB = 1024 * 1024
BACKLOG_BYTES = 120 * MIB
# Longer than any test waits: an agent that waited for the end of it would be one that hangs.
GRACE_SECONDS = 3600.0
PERIODIC, JUST_IN_TIME = agent_pb2.KIND_PERIODIC, agent_pb2.KIND_JUST_IN_TIME
NOT_DURABLE = 75

EVENTS = ("notice", "announce", "death", "sigterm")
# Who is dead announces nothing. Each event comes first, and last, where it can.
ORDERS = [order for order in itertools.permutations(EVENTS) if order.index("announce") < order.index("death")][::2]


class Pod:
    """A trainer, its agent, and a store behind a proxy."""

    def __init__(self, volume: Path, bucket: Bucket, proxy: FaultProxy, **settings: Any) -> None:
        self.proxy = proxy
        self.agent = AgentProcess(
            volume,
            bucket.destination,
            endpoint_url=proxy.endpoint_url,
            watch="off",
            **{"part_size_bytes": "5MiB", "grace_seconds": GRACE_SECONDS, **settings},
        )
        self.view = BucketView(bucket)

    def save(self, step: int, size_bytes: int, kind: agent_pb2.Kind = PERIODIC, **fields: object) -> str:
        directory = self.agent.checkpoints / f"checkpoint-{step}"
        if not directory.exists():
            write_checkpoint(directory, {"model.safetensors": size_bytes}, seed=step)
        return self.agent.announce(directory, step, kind=kind, **fields).save

    def warm_up(self) -> None:
        """Commit something, so that the agent knows the store and its speed."""
        self.agent.wait_committed(self.save(1, 2 * MIB))

    def committed_steps(self) -> list[int]:
        """In the order of their commits."""
        return [line["step"] for line in self.agent.log("checkpoint.committed")]

    def not_durable(self) -> list[str]:
        """What the agent said on leaving, one line per checkpoint."""
        return [line for line in self.agent.log_text().splitlines() if line.startswith("keepstep: not durable: ")]

    def stored_steps(self) -> list[int]:
        """Steps with a commit marker, straight from the server."""
        return self.view.steps()


@pytest.fixture
def pod(tmp_path: Path, rclone_bucket: Bucket, fault_proxy: FaultProxy) -> Pod:
    return Pod(tmp_path / "volume", rclone_bucket, fault_proxy)


def left_at(agent: AgentProcess) -> float:
    """When it decided to leave, unix seconds; its end follows as fast as the machine lets it."""
    return datetime.fromisoformat(agent.log("agent.exiting")[-1]["timestamp"]).timestamp()


@pytest.mark.parametrize("order", [*ORDERS[:2], *nightly(*ORDERS[2:])], ids="-".join)
def test_with_time_enough_the_last_save_and_then_the_backlog_are_committed(pod: Pod, order: tuple[str, ...]) -> None:
    pod.proxy.throttle(8 * MIB)
    with pod.agent as agent, TrainerProcess(agent.volume) as trainer:
        pod.warm_up()
        wait_until(lambda: agent.status().live_ranks == 1, HANG_SECONDS, "the agent sees the trainer")
        # Nothing of the backlog is stored before the last save is announced.
        pod.proxy.throttle(MIB // 16)
        for step in (10, 20):
            pod.save(step, 5 * MIB)
        actions: dict[str, Callable[[], object]] = {
            "notice": lambda: agent.notify_termination(source="preStop"),
            "announce": lambda: pod.save(30, MIB, JUST_IN_TIME),
            "death": trainer.die,
            "sigterm": agent.terminate,
        }
        for name in order:
            actions[name]()
        pod.proxy.throttle(8 * MIB)
        code = agent.wait(HANG_SECONDS)
    assert code == 0, agent.log_text()
    assert pod.committed_steps()[:2] == [1, 30]
    assert pod.stored_steps() == [1, 10, 20, 30]
    assert pod.not_durable() == []


def test_with_too_little_time_the_newest_goes_first_and_the_rest_is_named(
    tmp_path: Path, rclone_bucket: Bucket, fault_proxy: FaultProxy
) -> None:
    # What was on the way when it was taken off the wire still goes through the proxy: little, on two connections.
    pod = Pod(tmp_path / "volume", rclone_bucket, fault_proxy, max_concurrency=2)
    # Four minutes for each of the backlog: it fits as little when a busy machine has sent some before the notice.
    pod.proxy.throttle(MIB // 2)
    with pod.agent as agent, TrainerProcess(agent.volume) as trainer:
        pod.warm_up()
        for step in (10, 20):
            pod.save(step, BACKLOG_BYTES)
        agent.notify_termination(grace_seconds=110)
        deadline = agent.status().deadline
        pod.save(30, MIB, JUST_IN_TIME)
        trainer.die()
        agent.terminate()
        code = agent.wait(HANG_SECONDS)
    assert code == 0, agent.log_text()
    # Nothing more would fit, so it does not stay for its deadline.
    assert deadline - left_at(agent) > 5
    assert pod.stored_steps() == [1, 30]
    lines = pod.not_durable()
    assert [line.split()[3] for line in lines] == ["checkpoint-20", "checkpoint-10"]
    assert all(line.endswith(f"its files lie under {agent.volume}") for line in lines)
    for step in (10, 20):
        assert (agent.checkpoints / f"checkpoint-{step}" / "model.safetensors").stat().st_size == BACKLOG_BYTES


def test_when_not_even_the_newest_fits_the_exit_code_and_a_line_for_each_say_so(pod: Pod) -> None:
    pod.proxy.throttle(MIB // 2)
    with pod.agent as agent, TrainerProcess(agent.volume) as trainer:
        pod.warm_up()
        pod.save(10, 20 * MIB)
        pod.save(20, 40 * MIB, JUST_IN_TIME)
        # Whoever waited for the bytes now would wait for ten minutes.
        pod.proxy.throttle(MIB // 16)
        agent.notify_termination(grace_seconds=6)
        trainer.die()
        agent.terminate()
        assert agent.wait(HANG_SECONDS) == NOT_DURABLE, agent.log_text()
        assert [line.split()[3] for line in pod.not_durable()] == ["checkpoint-20", "checkpoint-10"]
        assert pod.stored_steps() == [1]

        # What lay on the volume goes out with the next start of the pod.
        pod.proxy.throttle(0)
        agent.start()
        wait_until(lambda: pod.stored_steps() == [1, 10, 20], HANG_SECONDS, "what was left is committed")


def test_a_trainer_that_dies_without_saving_is_not_waited_for(pod: Pod) -> None:
    with pod.agent as agent, TrainerProcess(agent.volume) as trainer:
        pod.warm_up()
        pod.save(10, 2 * MIB)
        agent.notify_termination()
        agent.terminate()
        wait_until(lambda: pod.stored_steps() == [1, 10], HANG_SECONDS, "the backlog is committed")
        assert agent.process.poll() is None, "it left a living trainer that owes its last save"
        trainer.die()
        code = agent.wait(HANG_SECONDS)
    assert code == 0, agent.log_text()


def test_a_trainer_that_never_saves_is_waited_for_until_the_grace_ends(
    tmp_path: Path, rclone_bucket: Bucket, fault_proxy: FaultProxy
) -> None:
    reserve_seconds = 60.0
    pod = Pod(tmp_path / "volume", rclone_bucket, fault_proxy, commit_reserve_seconds=reserve_seconds)
    with pod.agent as agent, TrainerProcess(agent.volume):
        pod.warm_up()
        agent.notify_termination(grace_seconds=reserve_seconds + 8)
        deadline = agent.status().deadline
        agent.terminate()
        code = agent.wait(HANG_SECONDS)
    assert code == 0, agent.log_text()
    # The reserve for the commit is not waited away: who did would leave in the last second.
    assert 1 < deadline - left_at(agent) < reserve_seconds + 1


def test_a_trainer_that_lives_on_after_its_last_save_does_not_hold_the_agent_up(pod: Pod) -> None:
    with pod.agent as agent, TrainerProcess(agent.volume):
        pod.warm_up()
        agent.notify_termination()
        pod.save(20, 2 * MIB, JUST_IN_TIME)
        agent.terminate()
        code = agent.wait(HANG_SECONDS)
    assert code == 0, agent.log_text()
    assert pod.stored_steps() == [1, 20]


def test_every_local_rank_is_waited_for(pod: Pod) -> None:
    with pod.agent as agent, TrainerProcess(agent.volume), TrainerProcess(agent.volume, local_rank=1):
        pod.warm_up()
        agent.notify_termination()
        agent.terminate()
        shared = {"save": "attempt-20", "world_size": 2, "local_world_size": 2}
        pod.save(20, 2 * MIB, JUST_IN_TIME, rank=0, **shared)
        assert agent.status().checkpoints[0].phase == agent_pb2.PHASE_ANNOUNCED
        pod.save(20, 2 * MIB, JUST_IN_TIME, rank=1, **shared)
        code = agent.wait(HANG_SECONDS)
    assert code == 0, agent.log_text()
    assert pod.stored_steps() == [1, 20]


def test_an_agent_that_crashes_while_it_ends_goes_on_ending_after_its_restart(pod: Pod) -> None:
    pod.proxy.throttle(8 * MIB)
    with pod.agent as agent, TrainerProcess(agent.volume) as trainer:
        pod.warm_up()
        # Neither is whole before the agent is killed, however late that is.
        for name, target in (("older", "/checkpoint-10/"), ("last", "partNumber=6")):
            pod.proxy.add(Rule(name=name, fault=Fault.BLACKHOLE, method="PUT", target=target, times=-1))
        pod.save(10, 20 * MIB)
        agent.notify_termination()
        deadline = agent.status().deadline
        pod.save(20, 30 * MIB, JUST_IN_TIME)
        agent.terminate()
        wait_until(
            lambda: agent.status().checkpoints[0].durable_bytes > 0, HANG_SECONDS, "a part of the last save is stored"
        )
        agent.kill()
        assert pod.stored_steps() == [1]

        pod.proxy.clear()
        agent.start()
        status = agent.status()
        assert status.terminating
        assert status.deadline == pytest.approx(deadline, abs=1)
        trainer.die()
        agent.terminate()
        code = agent.wait(HANG_SECONDS)
    assert code == 0, agent.log_text()
    assert pod.stored_steps() == [1, 10, 20]
    steps = pod.committed_steps()
    assert steps.index(20) < steps.index(10)


def test_an_agent_that_is_leaving_refuses_new_announcements_clearly_or_is_gone(pod: Pod) -> None:
    with pod.agent as agent:
        pod.warm_up()
        agent.notify_termination()
        agent.terminate()
        assert agent.wait(HANG_SECONDS) == 0
        with pytest.raises(grpc.RpcError) as refusal:
            pod.save(20, MIB)
    assert refusal.value.code() is grpc.StatusCode.UNAVAILABLE

"""One job in two pods: two agents, two volumes, two torchruns, one bucket. Only what both have stored counts."""

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from tests.harness.agent_process import AgentProcess, wait_until
from tests.harness.bounds import HANG_SECONDS
from tests.harness.bucket_view import BucketView
from tests.servers.fault_proxy import FaultProxy
from tests.servers.faults import Fault, Rule
from tests.servers.process import free_port
from tests.servers.server import Bucket
from tests.trainers.job import SLOW_SECONDS, Job
from tests.trainers.trainers import EXAMPLES, Moment

from keepstep.ranks.coordinator import PATIENCE_SECONDS
from keepstep_api import names
from keepstep_api.v1 import agent_pb2

pytestmark = [pytest.mark.trainers, pytest.mark.timeout(1800)]
PROGRAM = EXAMPLES / "ddp.py"
STEPS, SAVE_EVERY = 14, 5
ARGUMENTS = ("--steps", str(STEPS), "--save-every", str(SAVE_EVERY))


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """One rank of the job, and the agent beside it."""

    agent: AgentProcess
    job: Job

    def phase(self, step: int) -> "agent_pb2.Phase | None":
        """Of the checkpoint of that step, as this pod's agent sees it."""
        found = [one.phase for one in self.agent.status().checkpoints if one.step == step]
        return found[0] if found else None

    def kill(self) -> None:
        self.agent.kill()
        self.job.kill()

    def end(self) -> None:
        """The job has ended; so does the agent."""
        self.agent.terminate()
        self.agent.wait(HANG_SECONDS)


class Pods:
    """Starts the two of an attempt; the second one's line to the bucket can be cut."""

    def __init__(self, bucket: Bucket, proxy: FaultProxy, folder: Path) -> None:
        self.view = BucketView(bucket)
        self._bucket = bucket
        self._proxy = proxy
        self._folder = folder
        self._attempts = 0

    @contextmanager
    def attempt(self, *, begin: int) -> Iterator[tuple[Pod, Pod]]:
        """Each with a fresh volume, on which `begin` was restored; 0: nothing."""
        self._attempts += 1
        folder = self._folder / f"attempt-{self._attempts}"
        rendezvous = [
            "--nnodes=2",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint=127.0.0.1:{free_port()}",
            f"--rdzv-id={secrets.token_hex(4)}",
            "--local-addr=127.0.0.1",
        ]
        with (
            self._pod(folder / "a", self._bucket.endpoint_url, rendezvous, begin) as first,
            self._pod(folder / "b", self._proxy.endpoint_url, rendezvous, begin) as second,
        ):
            yield first, second

    @contextmanager
    def _pod(self, folder: Path, endpoint_url: str, rendezvous: list[str], begin: int) -> Iterator[Pod]:
        volume = folder / "volume"
        folder.mkdir(parents=True)
        if begin:
            assert self.view.restore(volume).name == f"checkpoint-{begin}"
        agent = AgentProcess(
            volume,
            self._bucket.destination,
            endpoint_url=endpoint_url,
            grace_seconds=HANG_SECONDS,
            # A line that is cut is given up sooner than usual.
            read_timeout_seconds=10,
        )
        job = Job(PROGRAM, ARGUMENTS, volume=volume, folder=folder / "job", begin=begin, ranks=1, launcher=rendezvous)
        with agent, job:
            yield Pod(agent=agent, job=job)

    def committed_steps(self) -> list[int]:
        return self.view.steps()


def test_a_checkpoint_counts_when_both_pods_have_stored_it_and_a_pod_that_dies_before_costs_only_that_one(
    rclone_bucket: Bucket, fault_proxy: FaultProxy, short_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Job(
        PROGRAM, ARGUMENTS, volume=short_directory / "undisturbed", folder=short_directory / "undisturbed-job"
    ) as job:
        assert job.wait() == 0, job.output()
        undisturbed = job.losses()

    pods = Pods(rclone_bucket, fault_proxy, short_directory)
    losses: dict[int, str] = {}
    with pods.attempt(begin=0) as (first, second):
        _cut(fault_proxy, 5)
        _train_to(6, first, second)
        _wait_sealed(first, 5)
        assert pods.committed_steps() == []
        fault_proxy.clear()
        wait_until(lambda: pods.committed_steps() == [5], HANG_SECONDS, "both have stored it")

        _cut(fault_proxy, 10)
        _train_to(11, first, second)
        _wait_sealed(first, 10)
        # Killed earlier, it would have the other pod's background save wait for its word.
        wait_until(lambda: second.phase(10) is not None, HANG_SECONDS, "the second has announced it")
        second.kill()
        first.job.order()
        assert first.job.wait(HANG_SECONDS + PATIENCE_SECONDS) != 0
        first.agent.kill()
        losses |= {step: loss for pod in (first, second) for step, loss in pod.job.losses().items() if step <= 5}
    assert pods.committed_steps() == [5]

    fault_proxy.clear()
    monkeypatch.setenv(names.ENV_ATTEMPT, "attempt-2")
    with pods.attempt(begin=5) as (first, second):
        stopped = _stop(7, partial(second.agent.notify_termination, source="preStop"), first, second)
        for pod in (first, second):
            pod.end()
            losses |= pod.job.losses()
    assert pods.committed_steps() == [5, stopped]

    monkeypatch.setenv(names.ENV_ATTEMPT, "attempt-3")
    with pods.attempt(begin=stopped) as (first, second):
        for pod in (first, second):
            assert pod.job.wait() == 0, pod.job.output()
        for pod in (first, second):
            pod.end()
            losses |= pod.job.losses()
    assert pods.committed_steps()[-1] == STEPS
    assert losses == undisturbed


def test_a_notice_to_the_launcher_that_has_the_jobs_store_makes_both_pods_save_one_step(
    rclone_bucket: Bucket, fault_proxy: FaultProxy, short_directory: Path
) -> None:
    pods = Pods(rclone_bucket, fault_proxy, short_directory)
    with pods.attempt(begin=0) as (first, second):
        _train_to(6, first, second)
        # The store of the job lives in the launcher of the pod with rank 0, which prints the losses.
        (holder,) = (pod for pod in (first, second) if pod.job.losses())
        stopped = _stop(6, partial(holder.job.signal, None), first, second)
        for pod in (first, second):
            pod.end()
    assert pods.committed_steps()[-1:] == [stopped]


def _stop(at_step: int, notify: Callable[[], object], *pods: Pod) -> int:
    """The step that all ranks saved, within two of the notice, when they leave."""
    _train_to(at_step, *pods)
    for pod in pods:
        pod.job.order(hold=Moment.STEP, at_step=at_step, step_seconds=SLOW_SECONDS)
    notify()
    for pod in pods:
        pod.job.order(step_seconds=SLOW_SECONDS)
    for pod in pods:
        assert pod.job.wait() != 0, pod.job.output()
    (stopped,) = {step for pod in pods for step in pod.job.last_steps()}
    assert at_step <= stopped <= at_step + 2
    return stopped


def _cut(proxy: FaultProxy, step: int) -> None:
    """Nothing of the second pod's share of that checkpoint arrives."""
    proxy.add(Rule(name=f"step {step}", fault=Fault.BLACKHOLE, method="PUT", target=f"/checkpoint-{step}/", times=-1))


def _train_to(step: int, *pods: Pod) -> None:
    for pod in pods:
        pod.job.order(hold=Moment.STEP, at_step=step)
    for pod in pods:
        pod.job.wait_held(Moment.STEP, step=step)


def _wait_sealed(pod: Pod, step: int) -> None:
    wait_until(lambda: pod.phase(step) == agent_pb2.PHASE_SEALED, HANG_SECONDS, f"step {step} is sealed")

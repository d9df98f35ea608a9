"""A loop that knows nothing of Keepstep and saves by torch.distributed.checkpoint, under autoload and a real agent."""

import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from tests.harness.agent_process import AgentProcess, wait_until
from tests.harness.bounds import HANG_SECONDS
from tests.harness.bucket_view import BucketView
from tests.servers.process import free_port
from tests.servers.server import Bucket
from tests.trainers.job import Job
from tests.trainers.trainers import EXAMPLES, Moment

from keepstep_api import names

pytestmark = [pytest.mark.trainers, pytest.mark.timeout(1200)]
ARGUMENTS = ("--steps", "12", "--save-every", "5")


def _agent(volume: Path, bucket: Bucket, restore: str = "whole") -> AgentProcess:
    return AgentProcess(volume, bucket.destination, endpoint_url=bucket.endpoint_url, watch="off", restore=restore)


@contextmanager
def _two_pods(bucket: Bucket, folder: Path, *arguments: str) -> Iterator[list[Job]]:
    """One job with a rank in each pod, on volumes to which nothing was restored."""
    launcher = ["--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}"]
    launcher += [f"--rdzv-id={secrets.token_hex(4)}", "--local-addr=127.0.0.1"]
    with ExitStack() as stack:
        agents, jobs = [], []
        for pod in ("a", "b"):
            volume = folder / pod
            agents.append(stack.enter_context(_agent(volume, bucket, names.LAZY)))
            one = Job(
                EXAMPLES / "dcp_loop.py",
                arguments,
                volume=volume,
                folder=folder / f"job-{pod}",
                ranks=1,
                launcher=launcher,
                autoload=True,
                environment={names.ENV_RESTORE: names.LAZY},
            )
            jobs.append(stack.enter_context(one))
        yield jobs
        for agent in agents:
            agent.terminate()
            assert agent.wait(HANG_SECONDS) == 0, agent.log_text()


def steps(view: BucketView) -> list[int]:
    """Of the committed checkpoints."""
    return view.steps()


@pytest.mark.parametrize("how", [(), ("--asynchronous",)], ids=["save", "async_save"])
def test_every_save_of_a_bare_loop_is_committed_and_it_resumes_from_the_bucket(
    how: tuple[str, ...], rclone_bucket: Bucket, tmp_path: Path
) -> None:
    view = BucketView(rclone_bucket)
    program = EXAMPLES / "dcp_loop.py"
    volume = tmp_path / "volume"
    losses: dict[int, str] = {}
    with _agent(volume, rclone_bucket) as agent:
        with Job(program, [*ARGUMENTS, *how], volume=volume, folder=tmp_path / "first", autoload=True) as job:
            job.order(hold=Moment.STEP, at_step=12)
            job.wait_held(Moment.STEP)
            wait_until(lambda: steps(view) == [5, 10], HANG_SECONDS, "both are committed")
            # Nobody could save once more, so it ends as it would without us.
            job.signal(0)
            assert job.wait() != 0
            losses |= job.losses()
        agent.terminate()
        assert agent.wait(HANG_SECONDS) == 0, agent.log_text()
    assert steps(view) == [5, 10]

    volume = tmp_path / "another"
    view.restore(volume)
    with _agent(volume, rclone_bucket) as agent:
        with Job(program, [*ARGUMENTS, *how], volume=volume, folder=tmp_path / "second", autoload=True) as job:
            assert job.wait() == 0, job.output()
            assert list(job.losses()) == [11, 12]
            assert losses[11] == job.losses()[11]
        agent.terminate()
        assert agent.wait(HANG_SECONDS) == 0, agent.log_text()
    assert steps(view) == [5, 10, 12]
    for step in (5, 10, 12):
        (manifest,) = [key for key in view.keys(f"step-{step}/") if "/.keepstep/manifest-" in key]
        assert manifest.endswith("/manifest-00000-00002.json")


def test_pods_of_a_bare_loop_have_the_newest_brought_when_their_ranks_have_met(
    rclone_bucket: Bucket, tmp_path: Path
) -> None:
    """The loop looks for its newest folder itself, which the agents bring to both volumes before it can look."""
    losses: dict[int, str] = {}
    for last, begun in ((10, 1), (12, 11)):
        arguments = ("--steps", str(last), "--save-every", "5")
        with _two_pods(rclone_bucket, tmp_path / str(last), *arguments) as jobs:
            assert [job.wait() for job in jobs] == [0, 0], "\n".join(job.output() for job in jobs)
            (trained,) = [job.losses() for job in jobs if job.losses()]
        assert list(trained) == list(range(begun, last + 1))
        losses |= trained
    assert steps(BucketView(rclone_bucket)) == [5, 10, 12]
    another = replace(rclone_bucket, prefix="runs/uninterrupted")
    with _two_pods(another, tmp_path / "all", "--steps", "12") as jobs:
        assert [job.wait() for job in jobs] == [0, 0], "\n".join(job.output() for job in jobs)
        assert [job.losses() for job in jobs if job.losses()] == [losses]

"""torchrun starts all ranks again when one dies; they resume from the volume, and can still agree on a last step."""

import re
import signal
from pathlib import Path

import pytest
from tests.harness.agent_process import AgentProcess, wait_until
from tests.harness.bounds import HANG_SECONDS
from tests.harness.bucket_view import BucketView, step_of
from tests.servers.server import Bucket
from tests.trainers.chain import GRACE_SECONDS
from tests.trainers.job import SLOW_SECONDS, Job
from tests.trainers.trainers import EXAMPLES, Moment

# A new store for each restart: in the one that torchrun keeps, gloo finds the addresses of the dead.
NEW_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

pytestmark = [pytest.mark.trainers, pytest.mark.timeout(1200)]


def test_ranks_that_were_started_again_resume_and_save_just_in_time_at_one_step(
    rclone_bucket: Bucket, tmp_path: Path
) -> None:
    volume = tmp_path / "volume"
    agent = AgentProcess(
        volume, rclone_bucket.destination, endpoint_url=rclone_bucket.endpoint_url, grace_seconds=GRACE_SECONDS
    )
    launcher = ["--standalone", "--local-addr=127.0.0.1", "--max-restarts=1"]
    arguments = ("--steps", "40", "--save-every", "5")
    job = Job(
        EXAMPLES / "ddp.py",
        arguments,
        volume=volume,
        folder=tmp_path / "job",
        launcher=launcher,
        environment=NEW_STORE,
    )
    with agent, job:
        job.order(hold=Moment.STEP, at_step=7)
        job.wait_held(Moment.STEP)
        wait_until(lambda: bool(agent.status().checkpoints), HANG_SECONDS, "the agent knows of the save")
        agent.wait_committed(agent.status().checkpoints[0].save)
        job.signal(1, signal.SIGKILL)
        # The new ranks count their steps from the one that they resume at; the old one saves no more.
        job.order(hold=Moment.SAVE, at_step=5)
        job.wait_for(lambda: job.restarts() == 1, "torchrun starts them again")
        job.wait_held(Moment.SAVE, ranks=1)
        job.order(hold=Moment.SAVE, at_step=5, step_seconds=SLOW_SECONDS)
        noticed = 5 + max(job.last_steps())
        job.signal(0)
        job.order(step_seconds=SLOW_SECONDS)
        assert job.wait() != 0
        stopped = {5 + step for step in job.last_steps()}
        agent.terminate()
        assert agent.wait(HANG_SECONDS) == 0, agent.log_text()
    (step,) = stopped
    assert noticed <= step <= noticed + 2
    marker = BucketView(rclone_bucket).markers()[-1]
    assert step_of(marker) == step, job.output()


def test_ranks_that_torchrun_starts_again_after_the_just_in_time_save_leave_before_the_first_step(
    rclone_bucket: Bucket, tmp_path: Path
) -> None:
    volume = tmp_path / "volume"
    agent = AgentProcess(
        volume, rclone_bucket.destination, endpoint_url=rclone_bucket.endpoint_url, grace_seconds=GRACE_SECONDS
    )
    job = Job(
        EXAMPLES / "ddp.py",
        ("--steps", "40", "--save-every", "5"),
        volume=volume,
        folder=tmp_path / "job",
        launcher=["--standalone", "--local-addr=127.0.0.1", "--max-restarts=2"],
        environment=NEW_STORE,
    )
    with agent, job:
        job.order(hold=Moment.STEP, at_step=7)
        job.wait_held(Moment.STEP)
        agent.notify_termination(source="preStop")
        job.order(step_seconds=SLOW_SECONDS)
        assert job.wait() != 0
        agent.terminate()
        assert agent.wait(HANG_SECONDS) == 0, agent.log_text()
    assert job.restarts() == 2
    assert [job.last_steps(restart) for restart in (1, 2)] == [[-1, -1]] * 2, job.output()
    (step,) = set(job.last_steps(restart=0))
    assert 7 <= step <= 9
    # Who leaves first does so by itself; by then torchrun may end the other one.
    codes = re.findall(r"exitcode +: (-?\d+)", job.output())
    assert len(codes) == 2, job.output()
    assert "143" in codes, job.output()
    assert set(codes) <= {"143", "-15", "-9"}, job.output()
    marker = BucketView(rclone_bucket).markers()[-1]
    assert step_of(marker) == step, job.output()

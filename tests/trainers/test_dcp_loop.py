"""A loop that knows nothing of Mooring and saves by torch.distributed.checkpoint, under autoload and a real agent."""

from pathlib import Path

import pytest
from tests.harness.agent_process import AgentProcess, wait_until
from tests.harness.bucket_view import BucketView
from tests.servers.server import Bucket
from tests.trainers.job import END_SECONDS, Job
from tests.trainers.trainers import EXAMPLES, Moment

pytestmark = [pytest.mark.trainers, pytest.mark.timeout(600)]
ARGUMENTS = ("--steps", "12", "--save-every", "5")


def _agent(volume: Path, bucket: Bucket) -> AgentProcess:
    return AgentProcess(volume, bucket.destination, endpoint_url=bucket.endpoint_url, watch="off")


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
            wait_until(lambda: steps(view) == [5, 10], END_SECONDS, "both are committed")
            # Nobody could save once more, so it ends as it would without us.
            job.signal(0)
            assert job.wait() != 0
            losses |= job.losses()
        agent.terminate()
        assert agent.wait(END_SECONDS) == 0, agent.log_text()
    assert steps(view) == [5, 10]

    volume = tmp_path / "another"
    view.restore(volume)
    with _agent(volume, rclone_bucket) as agent:
        with Job(program, [*ARGUMENTS, *how], volume=volume, folder=tmp_path / "second", autoload=True) as job:
            assert job.wait() == 0, job.output()
            assert list(job.losses()) == [11, 12]
            assert losses[11] == job.losses()[11]
        agent.terminate()
        assert agent.wait(END_SECONDS) == 0, agent.log_text()
    assert steps(view) == [5, 10, 12]
    for step in (5, 10, 12):
        (manifest,) = [key for key in view.keys(f"step-{step}/") if "/.mooring/manifest-" in key]
        assert manifest.endswith("/manifest-00000-00002.json")

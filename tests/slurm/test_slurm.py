"""The scripts of docs/slurm.md on real Slurm: whatever ends a job, its next start goes on from its last step."""

import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import pytest
from tests.harness.bounds import HANG_SECONDS
from tests.harness.bucket_view import BucketView
from tests.servers.server import Bucket
from tests.servers.slurm import SlurmCluster, missing_programs

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.root,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can run slurmd"),
    pytest.mark.skipif(
        bool(missing_programs()), reason=f"Slurm's and munge's packages are not installed: {missing_programs()}"
    ),
]
ROOT: Final = Path(__file__).parents[2]
SCRIPTS: Final = ROOT / "examples" / "slurm"
PROGRAM: Final = Path(__file__).with_name("train.py")
# Each look is a command that asks the controller.
POLL_SECONDS: Final = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A cluster, the directory in which its jobs run, and the bucket below which the scripts have their runs."""

    cluster: SlurmCluster
    directory: Path
    bucket: Bucket

    def starts(self, rank: int = 0, array_task: int = 0) -> list[list[int]]:
        """Return each start of a trainer: where it began, then its steps."""
        log = self.directory / f"steps-{array_task}-{rank}.log"
        text = log.read_text() if log.exists() else ""
        starts: list[list[int]] = []
        for line in text[: text.rfind("\n") + 1].splitlines():
            if line.startswith("begin "):
                starts.append([])
            starts[-1].append(int(line.removeprefix("begin ")))
        return starts

    def wait_steps(self, start: int, *, rank: int = 0, array_task: int = 0) -> None:
        """Wait until the start with this number, from 1, has done a few steps."""

        def done() -> bool:
            starts = self.starts(rank, array_task)
            return len(starts) >= start and len(starts[start - 1]) > 3

        self.wait(done, f"start {start} of rank {rank} trains")

    def wait_state(self, job: str, *states: str) -> None:
        self.wait(lambda: self.cluster.state(job) in states, f"job {job} is {' or '.join(states)}")

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until `condition` holds; fails at once if no job is left that could bring it about."""
        deadline = time.monotonic() + HANG_SECONDS
        while not condition():
            can_come = time.monotonic() < deadline and self.cluster.has_jobs()
            assert can_come or condition(), f"never: {what}\n{self.cluster.logs()}"
            time.sleep(POLL_SECONDS)

    def committed(self, run: str) -> list[int]:
        return BucketView(replace(self.bucket, prefix=f"{self.bucket.prefix}/{run}")).steps()

    def assert_goes_on(self, run: str, *, rank: int = 0, array_task: int = 0) -> None:
        """The second start began where the first one ended, which is what it saved just in time."""
        first, second, *_ = self.starts(rank, array_task)
        assert first[0] == 0
        assert second[0] == first[-1], self.cluster.logs()
        assert first[-1] in self.committed(run)

    def output(self, job: str) -> str:
        return (self.directory / f"slurm-{job}.out").read_text()


@pytest.fixture
def place(short_directory: Path, rclone_bucket: Bucket) -> Iterator[Place]:
    shutil.copy(PROGRAM, short_directory)
    environment = {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "RUNS": rclone_bucket.destination,
        "AWS_ENDPOINT_URL": rclone_bucket.endpoint_url,
        "GLOO_SOCKET_IFNAME": "lo",
    }
    cluster = SlurmCluster(short_directory, environment)
    try:
        cluster.start()
        yield Place(cluster=cluster, directory=short_directory, bucket=rclone_bucket)
    finally:
        cluster.stop()


def test_a_requeued_job_goes_on_from_its_last_step(place: Place) -> None:
    job = place.cluster.submit(SCRIPTS / "one_node.sh")
    place.wait_steps(1)
    place.cluster.run("scontrol", "requeue", job)
    place.wait_steps(2)
    place.assert_goes_on("one")
    assert re.search(rf"run.slurm .*job={job} .*restarts=1 ", place.output(job))


@pytest.mark.parametrize(
    ("partition", "script", "run"),
    [
        pytest.param("low", "one_node.sh", "one", id="at once"),
        # Then Slurm does not requeue the job, as it exits by itself.
        pytest.param("patient", "time_limit.sh", "long", id="with a grace time"),
    ],
)
def test_a_job_that_a_higher_partition_preempts_goes_on_when_it_has_nodes_again(
    place: Place, partition: str, script: str, run: str
) -> None:
    place.cluster.submit(SCRIPTS / script, f"--partition={partition}")
    place.wait_steps(1)
    (place.directory / "urgent.sh").write_text("#!/bin/bash\nexec sleep 600\n")
    everything = ("--partition=high", "--nodes=2", "--exclusive")
    urgent = place.cluster.submit(place.directory / "urgent.sh", *everything)
    place.wait_state(urgent, "RUNNING")
    assert len(place.starts()) == 1
    place.cluster.run("scancel", urgent)
    place.wait_steps(2)
    place.assert_goes_on(run)


def test_a_job_that_is_told_of_its_time_limit_requeues_itself_and_goes_on(place: Place) -> None:
    job = place.cluster.submit(SCRIPTS / "time_limit.sh", "--time=2", "--signal=TERM@90")
    place.wait_steps(2)
    place.assert_goes_on("long")
    assert "TIME LIMIT" not in place.output(job)
    # What a person ends stays ended.
    place.cluster.run("scancel", job)
    place.wait_state(job, "CANCELLED")


def test_the_signal_before_a_time_limit_reaches_keepstep_as_the_batch_shell(place: Place) -> None:
    job = place.cluster.submit(SCRIPTS / "one_node.sh", "--time=2", "--signal=B:TERM@90")
    place.wait_state(job, "FAILED")
    assert "TIME LIMIT" not in place.output(job)
    # The next job, of the same directory, whatever node it comes to.
    place.cluster.submit(SCRIPTS / "one_node.sh")
    place.wait_steps(2)
    place.assert_goes_on("one")


def test_a_job_that_runs_out_of_time_saves_between_sigterm_and_sigkill(place: Place) -> None:
    job = place.cluster.submit(SCRIPTS / "one_node.sh")
    place.wait_steps(1)
    place.cluster.run("scontrol", "update", f"JobId={job}", "EndTime=now")
    place.wait_state(job, "TIMEOUT")
    place.cluster.submit(SCRIPTS / "one_node.sh")
    place.wait_steps(2)
    place.assert_goes_on("one")


@pytest.mark.parametrize(
    ("script", "run", "end"),
    [
        # What --signal=TERM does before a time limit. The ranks need longer to start than the shortest time limit.
        pytest.param(
            "nodes.sh", "nodes", ("scancel", "--signal=TERM"), id="torchrun on two nodes, before a time limit"
        ),
        pytest.param("tasks.sh", "tasks", ("scontrol", "requeue"), id="two tasks on a node, requeued"),
    ],
)
def test_two_tasks_of_a_job_go_on_together_from_their_last_step(
    place: Place, script: str, run: str, end: tuple[str, ...]
) -> None:
    pytest.importorskip("torch")
    job = place.cluster.submit(SCRIPTS / script)
    for rank in (0, 1):
        place.wait_steps(1, rank=rank)
    place.cluster.run(*end, job)
    for rank in (0, 1):
        place.wait_steps(2, rank=rank)
        place.assert_goes_on(run, rank=rank)
    assert place.starts(0)[1][0] == place.starts(1)[1][0]
    assert sorted(folder.name for folder in place.directory.glob("keepstep*")) == ["keepstep-task-0", "keepstep-task-1"]


def test_each_task_of_an_array_is_a_run_of_its_own(place: Place) -> None:
    job = place.cluster.submit(SCRIPTS / "array.sh")
    for task in (1, 2):
        place.wait_steps(1, array_task=task)
    place.cluster.run("scontrol", "requeue", f"{job}_2")
    place.wait_steps(2, array_task=2)
    place.assert_goes_on("sweep-2", array_task=2)
    assert len(place.starts(array_task=1)) == 1
    assert sorted(folder.name for folder in place.directory.glob("keepstep*")) == [
        "keepstep-array-1",
        "keepstep-array-2",
    ]


def test_tasks_that_are_given_one_volume_are_told_so_and_only_the_first_trains(place: Place) -> None:
    job = place.cluster.submit(SCRIPTS / "array.sh", f"--export=ALL,KEEPSTEP_VOLUME={place.directory}/shared")
    outputs = [place.directory / f"slurm-{job}_{task}.out" for task in (1, 2)]

    def refused() -> list[str]:
        return [path.read_text() for path in outputs if path.exists() and "another `keepstep run`" in path.read_text()]

    place.wait(lambda: bool(refused()), "the second one is refused")
    assert f"uses the volume {place.directory}/shared: process " in refused()[0]
    assert "hint: wait until it has ended, or give each run a volume of its own" in refused()[0]
    place.wait(lambda: any(len(place.starts(array_task=task)) == 1 for task in (1, 2)), "the first one trains")

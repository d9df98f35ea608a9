"""`keepstep run` with a launcher that ends before its ranks: they save just in time all the same, or are given up."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from tests.harness.agent_process import wait_until
from tests.harness.bounds import HANG_SECONDS
from tests.harness.bucket_view import BucketView
from tests.harness.run_process import TRAINER, RunProcess
from tests.servers.fault_proxy import FaultProxy
from tests.servers.server import Bucket

JUST_IN_TIME = 143

# Like `accelerate launch` with one process: it has no handler, and tells its rank nothing.
LAUNCHER = """
import os, subprocess, sys
from pathlib import Path
rank = subprocess.Popen([sys.executable, *sys.argv[1:]])
Path(os.environ["RANK_PID"]).write_text(str(rank.pid))
sys.exit(rank.wait())
"""
NEVER_SAVES = """
import os, time
from pathlib import Path
import keepstep
checkpointer = keepstep.Checkpointer()
checkpointer.resume()
print("ready", flush=True)
deadline = time.monotonic() + 300
while time.monotonic() < deadline:
    time.sleep(0.02)
"""


@contextmanager
def launched(bucket: Bucket, tmp_path: Path, *program: str, **options: Any) -> Iterator[RunProcess]:
    """A run of the launcher; what it leaves behind is gone in the end."""
    rank_pid = tmp_path / "rank-pid"
    command = (sys.executable, "-c", LAUNCHER, *program)
    trainer = {"RANK_PID": rank_pid, **options.pop("trainer", {})}
    options = {"endpoint_url": bucket.endpoint_url, **options}
    try:
        with RunProcess(tmp_path / "volume", bucket.destination, command=command, trainer=trainer, **options) as run:
            yield run
    finally:
        with suppress(FileNotFoundError, ProcessLookupError):
            os.kill(int(rank_pid.read_text()), signal.SIGKILL)


def launcher_pid(run: RunProcess) -> int:
    return next(pid for pid, line in run.children().items() if " -c " in line)


def committed_steps(bucket: Bucket) -> list[int]:
    return BucketView(bucket).steps()


def test_a_rank_whose_launcher_dies_of_the_sigterm_saves_just_in_time(rclone_bucket: Bucket, tmp_path: Path) -> None:
    # A slow step: the launcher is long gone, also for a busy runner, when the rank saves.
    with launched(rclone_bucket, tmp_path, str(TRAINER), trainer={"STEP_SECONDS": 5.0}, grace_seconds=600) as run:
        run.wait_steps(1)
        run.signal(signal.SIGTERM)
        assert run.wait() == JUST_IN_TIME, run.output()
        (waits,) = run.log("run.waits_for_processes")
        assert waits["pids"] == [int((tmp_path / "rank-pid").read_text())]
        assert committed_steps(rclone_bucket) == [run.steps()[-1][0]]


def test_a_rank_whose_launcher_was_killed_is_asked_to_save_and_leave(rclone_bucket: Bucket, tmp_path: Path) -> None:
    with launched(rclone_bucket, tmp_path, str(TRAINER), grace_seconds=600) as run:
        run.wait_steps(3)
        os.kill(launcher_pid(run), signal.SIGKILL)
        assert run.wait() == JUST_IN_TIME, run.output()
        assert committed_steps(rclone_bucket) == [run.steps()[-1][0]]


def test_a_rank_left_behind_that_does_not_save_is_given_up_after_the_grace_period(
    rclone_bucket: Bucket, tmp_path: Path
) -> None:
    with launched(rclone_bucket, tmp_path, "-c", NEVER_SAVES, grace_seconds=3) as run:
        wait_until(lambda: "ready\n" in run.output(), HANG_SECONDS, "the rank runs")
        os.kill(launcher_pid(run), signal.SIGKILL)
        assert run.wait() == 128 + signal.SIGKILL, run.output()
        assert run.log("ranks.given_up")
    assert not BucketView(rclone_bucket).markers()


@pytest.mark.nightly
def test_no_notice_no_deadline_the_save_of_a_rank_left_behind_may_take_its_time(
    rclone_bucket: Bucket, fault_proxy: FaultProxy, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"grace_seconds": 3, "trainer": {"SAVE_BYTES": 3_000_000}}
    with launched(rclone_bucket, tmp_path, str(TRAINER), endpoint_url=fault_proxy.endpoint_url, **options) as run:
        run.wait_steps(3)
        # It takes longer than the grace period.
        fault_proxy.throttle(500_000)
        os.kill(launcher_pid(run), signal.SIGKILL)
        assert run.wait() == JUST_IN_TIME, run.output()
        assert committed_steps(rclone_bucket) == [run.steps()[-1][0]]

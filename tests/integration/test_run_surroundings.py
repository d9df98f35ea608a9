"""`keepstep run` beside another run, below srun or nohup, killed, and when nobody reads what it says."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.harness.agent_process import wait_until
from tests.harness.bounds import HANG_SECONDS
from tests.harness.bucket_view import BucketView
from tests.harness.run_process import JUST_IN_TIME, TRAINER, RunProcess
from tests.servers.server import Bucket


def test_a_second_run_on_a_volume_is_refused_and_named_the_first(tmp_path: Path) -> None:
    volume, destination = tmp_path / "volume", f"file://{tmp_path}/store"
    with RunProcess(volume, destination) as first:
        first.wait_steps(2)
        again = [
            sys.executable,
            "-m",
            "keepstep_agent",
            "run",
            "--to",
            destination,
            "--volume",
            str(volume),
            "--",
            "true",
        ]
        second = subprocess.run(again, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)
        assert second.returncode == 1
        holder = f"process {first.process.pid} on {socket.gethostname()}"
        assert second.stderr.splitlines()[0] == f"error: another `keepstep run` uses the volume {volume}: {holder}"
        assert second.stderr.splitlines()[1].startswith("hint: ")
        first.kill_agent()
        first.signal(signal.SIGTERM)
        assert first.wait() == JUST_IN_TIME, first.output()
    # With the first one the lock is gone, however it ended.
    assert subprocess.run(again, capture_output=True, timeout=HANG_SECONDS, check=False).returncode == 0


def test_a_run_of_srun_is_warned_that_its_ranks_have_no_agent(tmp_path: Path) -> None:
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/sh\nexec "$@"\n')
    srun.chmod(0o755)
    command = (str(srun), sys.executable, str(TRAINER))
    with RunProcess(tmp_path / "volume", f"file://{tmp_path}/store", command=command, trainer={"STEPS": 1}) as run:
        assert run.wait() == 0, run.output()
    (warning,) = run.log("run.launcher")
    assert "write srun before keepstep" in warning["problem"]


def test_a_program_is_told_what_the_agent_stores_by_itself(tmp_path: Path) -> None:
    command = ("sh", "-c", 'echo "told $KEEPSTEP_WATCHED"; touch "$KEEPSTEP_WATCHED/file"')
    (tmp_path / "out").mkdir()
    with RunProcess(tmp_path / "volume", f"file://{tmp_path}/store", command=command, watch=tmp_path / "out") as run:
        assert run.wait() == 0, run.output()
    assert f"told {tmp_path / 'out'}\n" in run.output()


def runs(pid: int) -> bool:
    """A process that ended and was adopted by somebody who does not wait for it has no command line any more."""
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return False


@pytest.mark.parametrize("lives_before", [0, 1])
def test_a_runner_that_was_killed_leaves_no_training_behind_and_no_step_unsaved(
    lives_before: int, rclone_bucket: Bucket, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"endpoint_url": rclone_bucket.endpoint_url, "grace_seconds": 600}
    for _ in range(lives_before):
        # Its just-in-time save is not that of the next life.
        with RunProcess(tmp_path / "volume", rclone_bucket.destination, **options) as run:
            run.wait_steps(3)
            run.signal(signal.SIGTERM)
            assert run.wait() == JUST_IN_TIME, run.output()
    with RunProcess(tmp_path / "volume", rclone_bucket.destination, **options) as run:
        run.wait_steps(3)
        children = list(run.children())
        run.process.kill()
        wait_until(lambda: not any(map(runs, children)), HANG_SECONDS, "its children end")
    steps = BucketView(rclone_bucket).steps()
    assert (len(steps), steps[-1]) == (lives_before + 1, run.steps()[-1][0])


def test_a_run_under_nohup_outlives_its_terminal(tmp_path: Path) -> None:
    with RunProcess(tmp_path / "volume", f"file://{tmp_path}/store", prefix=("nohup",)) as run:
        run.wait_steps(2)
        run.signal(signal.SIGHUP)
        run.wait_steps(5)
        assert not run.log("run.signal")
        run.signal(signal.SIGTERM)
        assert run.wait() == JUST_IN_TIME, run.output()


def test_a_run_whose_stderr_nobody_reads_any_more_still_saves_just_in_time(
    rclone_bucket: Bucket, tmp_path: Path
) -> None:
    step_log = tmp_path / "steps.log"
    environment = {"STEPS": "100000", "EVERY": "0", "SAVE_BYTES": "100000", "STEP_SECONDS": "0.02"}
    command = [sys.executable, "-m", "keepstep_agent", "run", "--to", rclone_bucket.destination]
    command += ["--volume", str(tmp_path / "volume"), "--endpoint-url", rclone_bucket.endpoint_url]
    reading, writing = os.pipe()
    try:
        process = subprocess.Popen(
            [*command, "--", sys.executable, str(TRAINER)],
            env={**os.environ, **environment, "STEP_LOG": str(step_log)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=writing,
        )
    finally:
        os.close(writing)
    try:
        wait_until(lambda: step_log.exists() and len(step_log.read_text().splitlines()) > 3, HANG_SECONDS, "training")
        os.close(reading)
        process.send_signal(signal.SIGTERM)
        assert process.wait(HANG_SECONDS) == JUST_IN_TIME
    finally:
        process.kill()
        process.wait(HANG_SECONDS)
    assert len(BucketView(rclone_bucket).markers()) == 1

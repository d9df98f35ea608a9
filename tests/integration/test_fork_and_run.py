"""`keepstep run` as a user meets it: a real program with the real client, a real store, real signals."""

import os
import shutil
import signal
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from tests.harness.agent_process import wait_until
from tests.harness.bounds import HANG_SECONDS
from tests.harness.bucket_view import BucketView, step_of
from tests.harness.run_process import RunProcess
from tests.integration.test_run_agent_deaths import next_agent_held
from tests.servers.fault_proxy import FaultProxy
from tests.servers.process import free_port
from tests.servers.server import Bucket

JUST_IN_TIME = 143
NOT_DURABLE = 75


def wait_for_another_marker(view: BucketView) -> None:
    before = len(view.markers())
    wait_until(lambda: len(view.markers()) > before, HANG_SECONDS, "another checkpoint is committed")


def logged_at(run: RunProcess, event: str) -> float:
    """When it last happened by the clock of the process that says so, unix seconds."""
    return datetime.fromisoformat(run.log(event)[-1]["timestamp"]).timestamp()


def test_a_stopped_run_saves_at_that_very_step_and_a_new_machine_resumes_there(
    rclone_bucket: Bucket, tmp_path: Path
) -> None:
    volume = tmp_path / "volume"
    options: dict[str, Any] = {"endpoint_url": rclone_bucket.endpoint_url, "grace_seconds": 600}
    with RunProcess(volume, rclone_bucket.destination, **options) as run:
        run.wait_steps(5)
        run.signal(signal.SIGTERM)
        assert run.wait() == JUST_IN_TIME, run.output()
        last_step = run.steps()[-1][0]
    assert "begin 0\n" in run.output()
    assert "just-in-time" in run.output()
    (marker,) = BucketView(rclone_bucket).markers()
    assert step_of(marker) == last_step

    # The machine is gone, and its disk with it.
    shutil.rmtree(volume)
    more = {"STEPS": last_step + 3}
    with RunProcess(volume, rclone_bucket.destination, trainer=more, **options) as again:
        assert again.wait() == 0, again.output()
    assert f"begin {last_step}\n" in again.output()
    assert [step for step, _ in again.steps()][-3:] == [last_step + 1, last_step + 2, last_step + 3]
    assert len(BucketView(rclone_bucket).markers()) == 2


def test_a_run_works_in_a_directory_whose_name_has_what_is_special_in_a_url(
    short_directory: Path,
) -> None:
    volume = short_directory / "exp #3?x%41 ünï"
    with RunProcess(volume, f"file://{short_directory}/store", trainer={"STEPS": 20, "EVERY": 10}) as run:
        assert run.wait() == 0, run.output()
    assert not run.log("run.agent_died")
    assert "keepstep: " not in run.output(), "the trainer reached its agent"
    assert len(list((short_directory / "store" / ".keepstep" / "commits").iterdir())) == 2


def test_training_never_notices_that_its_agent_was_killed_and_came_back(rclone_bucket: Bucket, tmp_path: Path) -> None:
    view = BucketView(rclone_bucket)
    options: dict[str, Any] = {"endpoint_url": rclone_bucket.endpoint_url}
    trainer = {"EVERY": 10, "SAVE_BYTES": 1_000_000}
    with RunProcess(tmp_path / "volume", rclone_bucket.destination, trainer=trainer, **options) as run:
        run.wait_steps(12)
        for _ in range(2):
            # None can come back before so many steps are done, and saves among them.
            with next_agent_held(run.volume):
                run.kill_agent()
                run.wait_steps(22)
            wait_for_another_marker(view)
        run.signal(signal.SIGTERM)
        assert run.wait() == JUST_IN_TIME, run.output()
        steps = run.steps()
    assert [step for step, _ in steps] == list(range(1, len(steps) + 1))
    assert len(run.log("agent.serving")) == 3
    rows = view.verify()
    assert [row["problems"] for row in rows] == [[]] * len(rows)
    assert rows[0]["step"] == steps[-1][0]


@pytest.mark.parametrize(("code", "expected"), [("0", 0), ("7", 7)])
def test_the_exit_code_is_the_programs_own(tmp_path: Path, code: str, expected: int) -> None:
    trainer = {"STEPS": 3, "EXIT_CODE": code}
    with RunProcess(tmp_path / "volume", f"file://{tmp_path}/store", trainer=trainer) as run:
        assert run.wait() == expected, run.output()
    assert "done 3\n" in run.output()


def test_a_program_that_dies_of_a_signal_ends_the_run_as_a_shell_would_say_it(tmp_path: Path) -> None:
    command = (sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    with RunProcess(tmp_path / "volume", f"file://{tmp_path}/store", command=command) as run:
        assert run.wait() == 128 + signal.SIGKILL, run.output()


def test_a_run_that_succeeds_but_cannot_store_its_result_says_so_when_it_is_told_to_end(tmp_path: Path) -> None:
    # Longer than a busy machine wakes an agent too late.
    grace_seconds = 15.0
    options: dict[str, Any] = {"endpoint_url": f"http://127.0.0.1:{free_port()}", "grace_seconds": grace_seconds}
    trainer = {"STEPS": 3}
    with RunProcess(tmp_path / "volume", "s3://bucket/run", trainer=trainer, restore="off", **options) as run:
        run.wait_program_ended()
        wait_until(lambda: bool(run.log("work.failed")), HANG_SECONDS, "the drain meets the absent store")
        # With time left the drain goes on: the store may come back.
        assert run.process.poll() is None
        run.signal(signal.SIGTERM)
        assert run.wait() == NOT_DURABLE, run.output()
    # The notice's own deadline, and no second grace after it.
    assert logged_at(run, "agent.exiting") - logged_at(run, "termination.noticed") < 2 * grace_seconds
    assert "not durable: checkpoint-3 (step 3, final)" in run.output()


def test_a_second_sigterm_changes_nothing_but_the_first_is_honoured(
    rclone_bucket: Bucket, fault_proxy: FaultProxy, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"endpoint_url": fault_proxy.endpoint_url, "grace_seconds": 600}
    with RunProcess(tmp_path / "volume", rclone_bucket.destination, **options) as run:
        run.wait_steps(3)
        # The drain cannot end before the second is taken, however late we send it.
        fault_proxy.outage(True)
        run.signal(signal.SIGTERM)
        wait_until(lambda: len(run.log("run.signal")) == 1, HANG_SECONDS, "the first SIGTERM is taken")
        run.signal(signal.SIGTERM)
        wait_until(lambda: len(run.log("run.signal")) == 2, HANG_SECONDS, "the second SIGTERM is taken")
        fault_proxy.outage(False)
        assert run.wait() == JUST_IN_TIME, run.output()
        last_step = run.steps()[-1][0]
    (marker,) = BucketView(rclone_bucket).markers()
    assert step_of(marker) == last_step


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("no-such-program", "not found in any folder of PATH"),
        ("./no-such-program", "No such file or directory"),
        ("no-program", "Permission denied"),
    ],
)
def test_a_program_that_cannot_be_started_is_an_error_with_the_reason_and_a_hint(
    tmp_path: Path, program: str, reason: str
) -> None:
    folder = tmp_path / "bin"
    # To the kernel both are the same: EACCES, as is a folder of PATH that we may not read.
    (folder / "no-such-program").mkdir(parents=True)
    (folder / "no-program").write_text("may not be executed")
    path = os.pathsep.join([str(folder), os.environ["PATH"]])
    with RunProcess(
        tmp_path / "volume", f"file://{tmp_path}/store", command=(program,), environment={"PATH": path}
    ) as run:
        assert run.wait() == 1, run.output()
    assert f"error: cannot start {program!r}: {reason}\nhint: " in run.output()


def test_no_process_of_a_run_outlives_it(tmp_path: Path) -> None:
    with RunProcess(tmp_path / "volume", f"file://{tmp_path}/store") as run:
        run.wait_steps(2)
        children = list(run.children())
        assert len(children) == 2
        run.signal(signal.SIGTERM)
        assert run.wait() == JUST_IN_TIME, run.output()
    assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]

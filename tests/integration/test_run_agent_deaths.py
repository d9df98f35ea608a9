"""`keepstep run` when its agent dies at a bad moment, or has a store that it cannot reach."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.harness.agent_process import wait_until
from tests.harness.bounds import HANG_SECONDS
from tests.harness.bucket_view import BucketView
from tests.harness.run_process import JUST_IN_TIME, NOT_DURABLE, TRAINER, RunProcess, ends_of
from tests.servers.fault_proxy import FaultProxy
from tests.servers.process import free_port
from tests.servers.server import Bucket


@contextmanager
def next_agent_held(volume: Path) -> Iterator[None]:
    """Meanwhile an agent that starts finds a link for a journal, ends, and is started again."""
    journal = volume / ".keepstep" / "agent" / "journal.sqlite3"
    aside = journal.rename(journal.with_name("aside"))
    journal.symlink_to("nowhere")
    yield
    aside.replace(journal)


def test_an_agent_that_dies_while_it_drains_is_started_again_and_finishes(
    rclone_bucket: Bucket, fault_proxy: FaultProxy, tmp_path: Path
) -> None:
    # It would take minutes, so that the agents are still at it when they are killed.
    fault_proxy.throttle(10_000)
    trainer = {"STEPS": 3, "SAVE_BYTES": 4_000_000}
    volume, endpoint_url = tmp_path / "volume", fault_proxy.endpoint_url
    with RunProcess(volume, rclone_bucket.destination, trainer=trainer, endpoint_url=endpoint_url) as run:
        run.wait_program_ended()
        for _ in range(2):
            run.kill_agent()
        fault_proxy.throttle(0)
        assert run.wait() == 0, run.output()
    assert len(ends_of(run)) == 2
    assert len(BucketView(rclone_bucket).markers()) == 1


KILL_THE_AGENT_AT_THE_END = f"""
import atexit, os, runpy, signal
from pathlib import Path

def kill_agent():
    children = Path(f"/proc/{{os.getppid()}}/task/{{os.getppid()}}/children").read_text().split()
    for pid in children:
        if b"agent" in Path(f"/proc/{{pid}}/cmdline").read_bytes().split(b"\\0"):
            os.kill(int(pid), signal.SIGKILL)

atexit.register(kill_agent)
runpy.run_path({str(TRAINER)!r}, run_name="__main__")
"""


@pytest.mark.parametrize("code", [0, 7])
def test_a_program_that_ends_without_an_agent_keeps_its_code_and_its_checkpoint_is_stored(
    rclone_bucket: Bucket, tmp_path: Path, code: int
) -> None:
    options: dict[str, Any] = {"endpoint_url": rclone_bucket.endpoint_url, "bandwidth_bytes_per_second": 1_000_000}
    trainer = {"STEPS": 3, "SAVE_BYTES": 3_000_000, "EXIT_CODE": code}
    command = (sys.executable, "-c", KILL_THE_AGENT_AT_THE_END)
    volume = tmp_path / "volume"
    with RunProcess(volume, rclone_bucket.destination, trainer=trainer, command=command, **options) as run:
        assert run.wait() == code, run.output()
    assert len(ends_of(run)) == 1
    assert len(BucketView(rclone_bucket).markers()) == 1


BREAK_THE_VOLUME = """
import os, signal, sys
from pathlib import Path
(Path(os.environ["KEEPSTEP_VOLUME"]) / ".keepstep" / "destination").write_text("s3://another/run")
runner = os.getppid()
for pid in Path(f"/proc/{runner}/task/{runner}/children").read_text().split():
    if b"agent" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\\0"):
        os.kill(int(pid), signal.SIGKILL)
sys.exit(int(os.environ["EXIT_CODE"]))
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("code", "expected"), [(0, NOT_DURABLE), (7, 7)])
def test_an_agent_that_never_comes_back_is_given_up_and_the_programs_failure_still_counts(
    tmp_path: Path, code: int, expected: int
) -> None:
    command = (sys.executable, "-c", BREAK_THE_VOLUME)
    with RunProcess(
        tmp_path / "volume", f"file://{tmp_path}/store", command=command, trainer={"EXIT_CODE": code}
    ) as run:
        assert run.wait() == expected, run.output()
    assert len(run.log("run.agent_given_up")) == 1


def test_with_a_lost_store_a_finished_program_ends_by_itself_and_the_code_says_so(tmp_path: Path) -> None:
    endpoint_url = f"http://127.0.0.1:{free_port()}"
    options: dict[str, Any] = {"endpoint_url": endpoint_url, "restore": "off", "drain_timeout_seconds": 3}
    with RunProcess(tmp_path / "volume", "s3://bucket/run", trainer={"STEPS": 3}, **options) as run:
        assert run.wait() == NOT_DURABLE, run.output()
    assert [line["program_code"] for line in run.log("run.not_durable")] == [0]


def test_a_just_in_time_save_that_a_lost_store_did_not_get_is_told_by_the_exit_code(tmp_path: Path) -> None:
    options: dict[str, Any] = {"endpoint_url": f"http://127.0.0.1:{free_port()}", "restore": "off", "grace_seconds": 20}
    with RunProcess(tmp_path / "volume", "s3://bucket/run", **options) as run:
        run.wait_steps(3)
        run.signal(signal.SIGTERM)
        assert run.wait() == NOT_DURABLE, run.output()
    assert [line["program_code"] for line in run.log("run.not_durable")] == [JUST_IN_TIME]


WAITS_FOR_A_FILE = """
import os, signal, sys, time
from pathlib import Path
signal.signal(signal.SIGTERM, lambda *_: os.write(1, b"told\\n"))
print("ready", flush=True)
deadline = time.monotonic() + 300
while not Path(os.environ["MAY_END"]).exists() and time.monotonic() < deadline:
    time.sleep(0.02)
"""


def test_a_notice_that_came_while_the_agent_was_away_reaches_the_next_one(tmp_path: Path) -> None:
    volume, may_end = tmp_path / "volume", tmp_path / "may-end"
    command = (sys.executable, "-c", WAITS_FOR_A_FILE)
    trainer = {"MAY_END": may_end}
    options: dict[str, Any] = {"command": command, "trainer": trainer, "grace_seconds": 600}
    with RunProcess(volume, f"file://{tmp_path}/store", **options) as run:
        wait_until(lambda: "ready\n" in run.output(), HANG_SECONDS, "the program runs")
        agent_pid = run.agent_pid()
        assert agent_pid is not None
        with next_agent_held(volume):
            os.kill(agent_pid, signal.SIGKILL)
            wait_until(lambda: bool(ends_of(run)), HANG_SECONDS, "the agent is away")
            run.signal(signal.SIGTERM)
            # The program does not wait for an agent to come back.
            wait_until(lambda: "told\n" in run.output(), HANG_SECONDS, "the program is told")
            assert len(run.log("agent.serving")) == 1
        wait_until(lambda: bool(run.log("termination.noticed")), HANG_SECONDS, "the next agent is told")
        may_end.touch()
        # Nothing is stored.
        assert run.wait() == 75, run.output()
    assert {line["source"] for line in run.log("termination.noticed")} == {"runner SIGTERM"}


def test_a_drain_is_hurried_by_a_signal_that_came_while_its_agent_was_away(tmp_path: Path) -> None:
    options: dict[str, Any] = {"endpoint_url": f"http://127.0.0.1:{free_port()}", "grace_seconds": 3.0}
    trainer = {"STEPS": 3}
    with RunProcess(tmp_path / "volume", "s3://bucket/run", trainer=trainer, restore="off", **options) as run:
        run.wait_program_ended()
        agent_pid = run.agent_pid()
        assert agent_pid is not None
        os.kill(agent_pid, signal.SIGKILL)
        wait_until(lambda: bool(ends_of(run)), HANG_SECONDS, "the agent is away")
        run.signal(signal.SIGTERM)
        # Unhurried, it would drain for ever.
        assert run.wait() == NOT_DURABLE, run.output()
    assert "not durable: checkpoint-3 (step 3, final)" in run.output()

"""`mooring run` when the agent dies at a bad moment, when signals come early, and when nobody reads what it says."""

import os
import signal
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.harness.agent_process import wait_until
from tests.harness.bucket_view import BucketView
from tests.harness.run_process import TRAINER, RunProcess
from tests.servers.fault_proxy import FaultProxy
from tests.servers.process import free_port
from tests.servers.server import Bucket

JUST_IN_TIME = 143
NOT_DURABLE = 75


@pytest.fixture
def silent_store() -> Iterator[str]:
    """The URL of a store that takes connections and never answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@contextmanager
def journal_held(volume: Path) -> Iterator[None]:
    """While somebody else holds the journal, an agent is starting."""
    state_directory = volume / ".mooring" / "agent"
    state_directory.mkdir(parents=True, exist_ok=True)
    with closing(sqlite3.connect(state_directory / "journal.sqlite3", isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("BEGIN EXCLUSIVE")
        yield


@contextmanager
def next_agent_held(volume: Path) -> Iterator[None]:
    """Meanwhile an agent that starts finds a link for a journal, ends, and is started again."""
    journal = volume / ".mooring" / "agent" / "journal.sqlite3"
    aside = journal.rename(journal.with_name("aside"))
    journal.symlink_to("nowhere")
    yield
    aside.replace(journal)


def ends_of(run: RunProcess) -> list[dict[str, object]]:
    return run.log("run.agent_died")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_during_the_restore_ends_the_run_before_the_program(
    silent_store: str, tmp_path: Path, number: signal.Signals
) -> None:
    with RunProcess(tmp_path / "volume", "s3://bucket/run", endpoint_url=silent_store) as run:
        wait_until(lambda: any(" restore " in line for line in run.children().values()), 60, "the restore runs")
        run.signal(number)
        assert run.wait() == 128 + number, run.output()
    assert "begin" not in run.output()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_agent_starts_ends_the_run_before_the_program(
    tmp_path: Path, number: signal.Signals
) -> None:
    volume = tmp_path / "volume"
    options: dict[str, Any] = {"restore": "off", "grace_seconds": 3}
    with journal_held(volume), RunProcess(volume, f"file://{tmp_path}/store", **options) as run:
        wait_until(lambda: run.agent_pid() is not None, 60, "the agent starts")
        agent_pid = run.agent_pid()
        run.signal(number)
        assert run.wait() == 128 + number, run.output()
        assert not Path(f"/proc/{agent_pid}").exists()
    assert "begin" not in run.output()


def test_an_agent_that_dies_while_it_drains_is_started_again_and_finishes(
    rclone_bucket: Bucket, fault_proxy: FaultProxy, tmp_path: Path
) -> None:
    # It would take minutes, so that the agents are still at it when they are killed.
    fault_proxy.throttle(30_000)
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
state_directory = Path(os.environ["MOORING_VOLUME"]) / ".mooring"
state_directory.rename(state_directory.with_name("away"))
state_directory.write_text("no directory")
runner = os.getppid()
for pid in Path(f"/proc/{runner}/task/{runner}/children").read_text().split():
    if b"agent" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\\0"):
        os.kill(int(pid), signal.SIGKILL)
sys.exit(int(os.environ["EXIT_CODE"]))
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("code", "expected"), [(0, NOT_DURABLE), (7, 7)])
def test_an_agent_that_never_comes_back_is_given_up_and_the_programs_failure_still_counts(
    tmp_path: Path, code: int, expected: int
) -> None:
    command = (sys.executable, "-c", BREAK_THE_VOLUME)
    with RunProcess(
        tmp_path / "volume", f"file://{tmp_path}/store", command=command, trainer={"EXIT_CODE": code}
    ) as run:
        assert run.wait(240) == expected, run.output()
    assert len(run.log("run.agent_given_up")) == 1


def test_with_a_lost_store_a_finished_program_ends_by_itself_and_the_code_says_so(tmp_path: Path) -> None:
    options: dict[str, Any] = {"endpoint_url": f"http://127.0.0.1:{free_port()}", "restore": "off", "grace_seconds": 3}
    with RunProcess(tmp_path / "volume", "s3://bucket/run", trainer={"STEPS": 3}, **options) as run:
        assert run.wait() == NOT_DURABLE, run.output()
    assert [line["program_code"] for line in run.log("run.not_durable")] == [0]


def test_a_just_in_time_save_that_a_lost_store_did_not_get_is_told_by_the_exit_code(tmp_path: Path) -> None:
    options: dict[str, Any] = {"endpoint_url": f"http://127.0.0.1:{free_port()}", "restore": "off", "grace_seconds": 8}
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


SAYS_WHAT_IT_IS_SENT = """
import os, signal, time
from pathlib import Path
NUMBERS = (signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
for number in NUMBERS:
    # Not print, which fails when a signal interrupts another print.
    signal.signal(number, lambda number, frame: os.write(1, f"got {signal.Signals(number).name}\\n".encode()))
print("ready", flush=True)
deadline = time.monotonic() + 300
while not Path(os.environ["MAY_END"]).exists() and time.monotonic() < deadline:
    time.sleep(0.02)
"""
IN_A_TERMINAL = """
import os, sys
if sys.argv[1] == "in the foreground":
    os.setsid()
    os.open(sys.argv[2], os.O_RDWR)
else:
    os.dup2(os.open(sys.argv[2], os.O_RDWR | os.O_NOCTTY), 0)
os.execvp(sys.argv[3], sys.argv[3:])
"""


@contextmanager
def run_that_says_what_it_is_sent(tmp_path: Path, *prefix: str) -> Iterator[RunProcess]:
    """Once its program is ready; it must end well."""
    may_end = tmp_path / "may-end"
    command = (sys.executable, "-c", SAYS_WHAT_IT_IS_SENT)
    options: dict[str, Any] = {"command": command, "trainer": {"MAY_END": may_end}, "prefix": prefix, "watch": "off"}
    with RunProcess(tmp_path / "volume", f"file://{tmp_path}/store", **options) as run:
        wait_until(lambda: "ready\n" in run.output(), 90, "the program runs")
        yield run
        may_end.touch()
        assert run.wait() == 0, run.output()


def send(run: RunProcess, number: signal.Signals) -> None:
    """To the runner; until the program has got it."""
    run.signal(number)
    wait_until(lambda: f"got {number.name}\n" in run.output(), 60, f"the program gets {number.name}")


def test_a_signal_whose_meaning_is_the_programs_own_reaches_it_and_nobody_else(tmp_path: Path) -> None:
    with run_that_says_what_it_is_sent(tmp_path) as run:
        agent_pid = run.agent_pid()
        assert agent_pid is not None
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            # As Slurm does it: to every process of the job.
            os.kill(agent_pid, number)
            send(run, number)
        send(run, signal.SIGQUIT)
    assert not ends_of(run)
    assert not run.log("termination.noticed")


def test_a_program_that_dies_of_a_passed_on_signal_ends_the_run_with_its_code(tmp_path: Path) -> None:
    with RunProcess(tmp_path / "volume", f"file://{tmp_path}/store") as run:
        run.wait_steps(2)
        children = list(run.children())
        run.signal(signal.SIGUSR1)
        assert run.wait() == 128 + signal.SIGUSR1, run.output()
    assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]
    assert [line["signal"] for line in run.log("run.program_has_no_handler")] == ["SIGUSR1"]


def test_a_launcher_that_is_told_to_stop_has_its_code_replaced_if_all_is_stored(tmp_path: Path) -> None:
    launcher = (
        f"{sys.executable} {TRAINER} & rank=$!\ntrap 'kill -TERM $rank; wait $rank; exit 1' TERM\nwait $rank\nexit 1\n"
    )
    with RunProcess(tmp_path / "volume", f"file://{tmp_path}/store", command=("bash", "-c", launcher)) as run:
        run.wait_steps(2)
        run.signal(signal.SIGTERM)
        assert run.wait() == JUST_IN_TIME, run.output()
    with RunProcess(
        tmp_path / "volume", f"file://{tmp_path}/store", command=("bash", "-c", launcher), trainer={"STEPS": 1}
    ) as run:
        assert run.wait() == 1, run.output()


def test_a_second_run_on_a_volume_is_refused_and_named_the_first(tmp_path: Path) -> None:
    volume, destination = tmp_path / "volume", f"file://{tmp_path}/store"
    with RunProcess(volume, destination) as first:
        first.wait_steps(2)
        again = [
            sys.executable,
            "-m",
            "mooring_agent",
            "run",
            "--to",
            destination,
            "--volume",
            str(volume),
            "--",
            "true",
        ]
        second = subprocess.run(again, capture_output=True, text=True, timeout=90, check=False)
        assert second.returncode == 1
        holder = f"process {first.process.pid} on {socket.gethostname()}"
        assert second.stderr.splitlines()[0] == f"error: another `mooring run` uses the volume {volume}: {holder}"
        assert second.stderr.splitlines()[1].startswith("hint: ")
        first.kill_agent()
        first.signal(signal.SIGTERM)
        assert first.wait() == JUST_IN_TIME, first.output()
    # With the first one the lock is gone, however it ended.
    assert subprocess.run(again, capture_output=True, timeout=90, check=False).returncode == 0


def test_a_run_of_srun_is_warned_that_its_ranks_have_no_agent(tmp_path: Path) -> None:
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/sh\nexec "$@"\n')
    srun.chmod(0o755)
    command = (str(srun), sys.executable, str(TRAINER))
    with RunProcess(tmp_path / "volume", f"file://{tmp_path}/store", command=command, trainer={"STEPS": 1}) as run:
        assert run.wait() == 0, run.output()
    (warning,) = run.log("run.launcher")
    assert "write srun before mooring" in warning["problem"]


@pytest.fixture
def terminal() -> Iterator[tuple[int, str]]:
    """The keyboard's end of a terminal, and the path of the other one."""
    keyboard, other_end = os.openpty()
    try:
        yield keyboard, os.ttyname(other_end)
    finally:
        os.close(keyboard)
        os.close(other_end)


def test_ctrl_c_in_a_terminal_reaches_the_program_once_although_its_stdin_is_elsewhere(
    tmp_path: Path, terminal: tuple[int, str]
) -> None:
    keyboard, path = terminal
    with run_that_says_what_it_is_sent(tmp_path, sys.executable, "-c", IN_A_TERMINAL, "in the foreground", path) as run:
        os.write(keyboard, b"\x03")
        wait_until(lambda: bool(run.log("run.signal")), 60, "the runner has got it too")
        send(run, signal.SIGUSR1)
    assert run.output().count("got SIGINT\n") == 1


def test_a_sigint_to_a_run_in_the_background_reaches_the_program(tmp_path: Path, terminal: tuple[int, str]) -> None:
    prefix = (sys.executable, "-c", IN_A_TERMINAL, "in the background", terminal[1])
    with run_that_says_what_it_is_sent(tmp_path, *prefix) as run:
        send(run, signal.SIGINT)


def runs(pid: int) -> bool:
    """A process that ended and was adopted by somebody who does not wait for it has no command line any more."""
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return False


def test_a_runner_that_was_killed_leaves_no_training_behind_and_no_step_unsaved(
    rclone_bucket: Bucket, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"endpoint_url": rclone_bucket.endpoint_url, "grace_seconds": 60}
    with RunProcess(tmp_path / "volume", rclone_bucket.destination, **options) as run:
        run.wait_steps(3)
        children = list(run.children())
        run.process.kill()
        wait_until(lambda: not any(map(runs, children)), 90, "its children end")
    assert BucketView(rclone_bucket).steps() == [run.steps()[-1][0]]


def test_a_notice_that_came_while_the_agent_was_away_reaches_the_next_one(tmp_path: Path) -> None:
    volume, may_end = tmp_path / "volume", tmp_path / "may-end"
    command = (sys.executable, "-c", WAITS_FOR_A_FILE)
    trainer = {"MAY_END": may_end}
    with RunProcess(volume, f"file://{tmp_path}/store", command=command, trainer=trainer) as run:
        wait_until(lambda: "ready\n" in run.output(), 90, "the program runs")
        agent_pid = run.agent_pid()
        assert agent_pid is not None
        with next_agent_held(volume):
            os.kill(agent_pid, signal.SIGKILL)
            wait_until(lambda: bool(ends_of(run)), 60, "the agent is away")
            run.signal(signal.SIGTERM)
            # The program does not wait for an agent to come back.
            wait_until(lambda: "told\n" in run.output(), 60, "the program is told")
            assert len(run.log("agent.serving")) == 1
        wait_until(lambda: bool(run.log("termination.noticed")), 60, "the next agent is told")
        may_end.touch()
        assert run.wait() == 0, run.output()
    assert {line["source"] for line in run.log("termination.noticed")} == {"runner SIGTERM"}


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
    command = [sys.executable, "-m", "mooring_agent", "run", "--to", rclone_bucket.destination]
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
        wait_until(lambda: step_log.exists() and len(step_log.read_text().splitlines()) > 3, 90, "training")
        os.close(reading)
        process.send_signal(signal.SIGTERM)
        assert process.wait(90) == JUST_IN_TIME
    finally:
        process.kill()
        process.wait(10)
    assert len(BucketView(rclone_bucket).markers()) == 1


def test_a_drain_is_hurried_by_a_signal_that_came_while_its_agent_was_away(tmp_path: Path) -> None:
    options: dict[str, Any] = {"endpoint_url": f"http://127.0.0.1:{free_port()}", "grace_seconds": 3.0}
    trainer = {"STEPS": 3}
    with RunProcess(tmp_path / "volume", "s3://bucket/run", trainer=trainer, restore="off", **options) as run:
        run.wait_program_ended()
        agent_pid = run.agent_pid()
        assert agent_pid is not None
        os.kill(agent_pid, signal.SIGKILL)
        wait_until(lambda: bool(ends_of(run)), 60, "the agent is away")
        run.signal(signal.SIGTERM)
        # Unhurried, it would drain for ever.
        assert run.wait() == NOT_DURABLE, run.output()
    assert "not durable: checkpoint-3 (step 3, final)" in run.output()

"""`keepstep run` and signals: early ones, those that the program handles itself, and those of a terminal."""

import os
import signal
import socket
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.harness.agent_process import wait_until
from tests.harness.bounds import HANG_SECONDS
from tests.harness.run_process import JUST_IN_TIME, TRAINER, RunProcess, ends_of


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
    state_directory = volume / ".keepstep" / "agent"
    state_directory.mkdir(parents=True, exist_ok=True)
    with closing(sqlite3.connect(state_directory / "journal.sqlite3", isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("BEGIN EXCLUSIVE")
        yield


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_during_the_restore_ends_the_run_before_the_program(
    silent_store: str, tmp_path: Path, number: signal.Signals
) -> None:
    with RunProcess(tmp_path / "volume", "s3://bucket/run", endpoint_url=silent_store) as run:
        wait_until(
            lambda: any(" restore " in line for line in run.children().values()), HANG_SECONDS, "the restore runs"
        )
        run.signal(number)
        assert run.wait() == (130 if number == signal.SIGINT else JUST_IN_TIME), run.output()
    assert "begin" not in run.output()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_agent_starts_ends_the_run_before_the_program(
    tmp_path: Path, number: signal.Signals
) -> None:
    volume = tmp_path / "volume"
    options: dict[str, Any] = {"restore": "off", "grace_seconds": 3}
    with journal_held(volume), RunProcess(volume, f"file://{tmp_path}/store", **options) as run:
        wait_until(lambda: run.agent_pid() is not None, HANG_SECONDS, "the agent starts")
        agent_pid = run.agent_pid()
        run.signal(number)
        assert run.wait() == 128 + number, run.output()
        assert not Path(f"/proc/{agent_pid}").exists()
    assert "begin" not in run.output()


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
        wait_until(lambda: "ready\n" in run.output(), HANG_SECONDS, "the program runs")
        yield run
        may_end.touch()
        assert run.wait() == 0, run.output()


def send(run: RunProcess, number: signal.Signals) -> None:
    """To the runner; until the program has got it."""
    run.signal(number)
    wait_until(lambda: f"got {number.name}\n" in run.output(), HANG_SECONDS, f"the program gets {number.name}")


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
        wait_until(lambda: bool(run.log("run.signal")), HANG_SECONDS, "the runner has got it too")
        send(run, signal.SIGUSR1)
    assert run.output().count("got SIGINT\n") == 1


def test_a_sigint_to_a_run_in_the_background_reaches_the_program(tmp_path: Path, terminal: tuple[int, str]) -> None:
    prefix = (sys.executable, "-c", IN_A_TERMINAL, "in the background", terminal[1])
    with run_that_says_what_it_is_sent(tmp_path, *prefix) as run:
        send(run, signal.SIGINT)

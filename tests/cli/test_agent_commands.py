"""status, save, terminating and doctor against a real agent and a real store, and what every command says of itself."""

import contextlib
import json
import os
import pty
import re
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from tests.harness import warm_python
from tests.harness.agent_process import AgentProcess, wait_until, write_checkpoint
from tests.harness.bounds import HANG_SECONDS
from tests.servers.server import Bucket

from keepstep.agent_client.liveness import hold_liveness_lock
from keepstep_agent.cli import cli

LONG_NAME = "llama-42-sft-epoch-3-step-24000-global"


def keepstep(
    *arguments: object, columns: int = 100, directory: Path | None = None, **environment: str
) -> "subprocess.CompletedProcess[str]":
    environment = {"KEEPSTEP_SOCKET": "", "KEEPSTEP_VOLUME": "", "COLUMNS": str(columns), **environment}
    return warm_python.keepstep(*arguments, directory=directory, **environment)


def shown_in_a_terminal(columns: int, *arguments: object, **environment: str) -> str:
    """What a command prints in a terminal that is so wide, without its colours."""
    ours, its = pty.openpty()
    termios.tcsetwinsize(its, (50, columns))
    command = [sys.executable, "-m", "keepstep_agent", *map(str, arguments)]
    subprocess.run(command, stdout=its, stdin=its, check=True, timeout=HANG_SECONDS, env={**os.environ, **environment})
    os.close(its)
    written = b""
    # The end of a terminal that nobody holds open any more is an error.
    with contextlib.suppress(OSError):
        while piece := os.read(ours, 65536):
            written += piece
    os.close(ours)
    return re.sub(r"\x1b\[[0-9;]*m", "", written.decode().replace("\r\n", "\n"))


@pytest.fixture
def agent(rclone_bucket: Bucket, tmp_path: Path) -> Iterator[AgentProcess]:
    destination, endpoint_url = rclone_bucket.destination, rclone_bucket.endpoint_url
    with AgentProcess(tmp_path / "v", destination, endpoint_url=endpoint_url) as running:
        yield running


def status_of(agent: AgentProcess) -> Any:
    return json.loads(keepstep("status", "--json", KEEPSTEP_VOLUME=str(agent.volume)).stdout)


def commit(agent: AgentProcess, name: str, step: int) -> None:
    announced = agent.announce(write_checkpoint(agent.checkpoints / name, {"model.safetensors": 3_000_000}), step)
    agent.wait_committed(announced.save)


def test_ready_says_by_its_exit_code_whether_an_agent_answers(agent: AgentProcess) -> None:
    shown = keepstep("ready", "--socket", agent.socket)
    assert (shown.returncode, shown.stdout, shown.stderr) == (0, "", "")
    agent.kill()
    shown = keepstep("ready", "--socket", agent.socket)
    assert (shown.returncode, shown.stdout) == (1, "")
    assert "no agent answers" in shown.stderr


def test_a_probe_loads_nothing_that_takes_long(tmp_path: Path) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "keepstep_agent", "ready", "--socket", str(tmp_path / "no")]
    said = subprocess.run(command, capture_output=True, text=True).stderr
    loaded = set(re.findall(r"\| +(\w+)$", said, re.MULTILINE))
    assert "click" in loaded
    assert loaded.isdisjoint({"grpc", "google", "structlog", "aiohttp", "asyncio"})


def test_status_before_the_first_checkpoint_says_what_a_crash_would_cost(agent: AgentProcess) -> None:
    shown = keepstep("status", "--socket", agent.socket)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.splitlines() == [
        f"agent 0.1.0 to {agent.destination}, 0 live ranks",
        "recovery point: none yet; a crash now would lose all work",
        "backlog: 0 B, upload rate not measured yet, drain in 0.0 s",
    ]


@pytest.mark.parametrize("columns", [80, 100])
def test_status_shows_names_whole_at_any_width(agent: AgentProcess, columns: int) -> None:
    commit(agent, LONG_NAME, 24000)
    shown = shown_in_a_terminal(columns, "status", "--socket", agent.socket, COLUMNS="")
    assert f"recovery point: step 24000 ({LONG_NAME})" in shown
    row = shown.partition("durable")[2]
    assert all(piece in row for piece in ("24000", LONG_NAME[:24], LONG_NAME[-6:], "periodic", "2.9 MiB"))
    assert max(map(len, shown.splitlines()[3:])) <= columns


def test_ls_in_a_terminal_of_80_columns_keeps_ordinary_names_on_one_line(
    agent: AgentProcess, rclone_bucket: Bucket
) -> None:
    commit(agent, LONG_NAME, 24000)
    commit(agent, "checkpoint-123456", 123456)
    options = ("--endpoint-url", rclone_bucket.endpoint_url)
    shown = shown_in_a_terminal(80, "ls", rclone_bucket.destination, *options, COLUMNS="")
    lines = shown.splitlines()
    assert lines[0].split() == ["STEP", "NAME", "KIND", "RANKS", "SIZE", "SAVED", "(UTC)", "SAVE"]
    assert lines[1].split()[:4] == ["123456", "checkpoint-123456", "periodic", "1"]
    assert "…" not in shown
    assert max(map(len, lines)) <= 80


def test_status_as_json_has_numbers_as_numbers_and_our_words(agent: AgentProcess) -> None:
    empty = status_of(agent)
    assert "newest_committed" not in empty
    assert (empty["checkpoints"], empty["live_ranks"], empty["terminating"]) == ([], 0, False)
    commit(agent, "checkpoint-12", 12)
    newest = status_of(agent)["newest_committed"]
    assert (newest["step"], newest["kind"], newest["durable_bytes"]) == (12, "periodic", 3_000_000)


def test_status_follows_every_change_until_the_agent_ends(agent: AgentProcess) -> None:
    command = [sys.executable, "-m", "keepstep_agent", "status", "--follow", "--json", "--socket", str(agent.socket)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as following:
        assert following.stdout is not None
        assert json.loads(following.stdout.readline())["checkpoints"] == []
        commit(agent, "checkpoint-12", 12)
        # It ends with the agent, at the latest when the test is over.
        seen = next(line for line in following.stdout if "newest_committed" in line)
        agent.terminate()
        _, complaint = following.communicate(timeout=HANG_SECONDS)
    assert json.loads(seen)["newest_committed"]["step"] == 12
    assert following.returncode == 1
    assert complaint.startswith("error: no agent answers on ")


def test_without_an_agent_every_command_says_where_it_looked(tmp_path: Path) -> None:
    for command in ("status", "save", "terminating"):
        unknown = keepstep(command, directory=tmp_path)
        assert unknown.returncode == 1
        assert "neither a socket nor a volume is known" in unknown.stderr.splitlines()[0]
        absent = keepstep(command, KEEPSTEP_VOLUME=str(tmp_path))
        assert absent.returncode == 1
        assert absent.stderr.splitlines() == [
            f"error: no agent answers on {tmp_path}/.keepstep/agent.sock",
            "hint: start the sidecar or `keepstep run`, or name another agent with --volume or --socket",
        ]


def test_the_agent_of_a_run_is_found_from_its_directory_and_by_its_volume(
    rclone_bucket: Bucket, tmp_path: Path
) -> None:
    volume = tmp_path / "keepstep"
    with AgentProcess(volume, rclone_bucket.destination, endpoint_url=rclone_bucket.endpoint_url) as agent:
        for command in ("status", "terminating"):
            here = keepstep(command, directory=tmp_path)
            there = keepstep(command, "--volume", volume, directory=volume, KEEPSTEP_SOCKET="/no/such.sock")
            assert (here.returncode, here.stderr) == (0, "")
            assert (there.returncode, there.stderr) == (0, "")
        assert keepstep("save", directory=tmp_path).stderr.startswith("asked nobody")
        assert agent.log("termination.noticed")


@pytest.mark.parametrize("arguments", [(), ("--json",)], ids=["text", "json"])
def test_save_fails_when_nobody_trains(agent: AgentProcess, arguments: tuple[str, ...]) -> None:
    assert keepstep("save", "--socket", agent.socket, *arguments).returncode == 1


def test_save_asks_every_live_rank(agent: AgentProcess) -> None:
    assert hold_liveness_lock(agent.volume / ".keepstep" / "ranks" / "0")
    wait_until(lambda: agent.status().live_ranks == 1, HANG_SECONDS, "the agent sees this process")
    asked = keepstep("save", "--socket", agent.socket, "--reason", "before maintenance")
    assert (asked.returncode, asked.stdout) == (0, "asked 1 local rank to save\n")
    assert json.loads(keepstep("save", "--socket", agent.socket, "--json").stdout) == {"ranks": 1}
    assert "1 live rank\n" in keepstep("status", "--socket", agent.socket).stdout
    assert [line["terminating"] for line in agent.log("save.requested")] == [False, False]


def test_terminating_returns_at_once_and_the_status_counts_down(agent: AgentProcess) -> None:
    told = keepstep("terminating", "--socket", agent.socket, "--grace-seconds", 600, "--source", "preStop")
    assert (told.returncode, told.stdout, told.stderr) == (0, "", "")
    assert status_of(agent)["terminating"] is True
    deadline = agent.status().deadline
    most = deadline - time.time()
    shown = re.search(r"^terminating: (\d+) s left$", keepstep("status", "--socket", agent.socket).stdout, re.MULTILINE)
    assert shown is not None
    assert deadline - time.time() - 1 < int(shown.group(1)) < most + 1
    assert 300 < most < 600


def test_colours_are_for_terminals_and_not_for_who_does_not_want_them(agent: AgentProcess) -> None:
    command = [sys.executable, "-m", "keepstep_agent", "status", "--socket", str(agent.socket)]
    ours, its = pty.openpty()
    for wish, coloured in (("", True), ("1", False)):
        subprocess.run(command, stdout=its, check=True, timeout=HANG_SECONDS, env={**os.environ, "NO_COLOR": wish})
        assert (b"\x1b[" in os.read(ours, 65536)) == coloured
    os.close(ours)
    os.close(its)


def test_doctor_gives_every_finding_and_fails_for_a_destination_that_is_none(rclone_bucket: Bucket) -> None:
    options = ("--endpoint-url", rclone_bucket.endpoint_url)
    fit = keepstep("doctor", rclone_bucket.destination, *options)
    assert fit.returncode == 0, fit.stderr
    assert "ok    put: objects can be written and replaced" in fit.stdout.splitlines()
    assert {line[:6] for line in fit.stdout.splitlines()} <= {"ok    ", "warn  ", "      "}
    unfit = keepstep("doctor", "s3://no-such-bucket-here/run", *options, "--json")
    assert unfit.returncode == 1
    assert [finding["verdict"] for finding in json.loads(unfit.stdout)][-1] == "fail"


def test_the_overview_fits_a_narrow_terminal() -> None:
    shown = keepstep("--help", columns=80).stdout
    assert shown.startswith("Usage: keepstep [OPTIONS] COMMAND")
    assert "..." not in shown.partition("Commands:")[2]


def test_where_the_webhooks_packages_are_missing_it_says_what_to_install(tmp_path: Path) -> None:
    program = "import sys; sys.modules['cryptography'] = None; from keepstep_agent.__main__ import main; main()"
    command = [sys.executable, "-c", program, "webhook", "--image=keepstep", f"--certificates={tmp_path}"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS)
    assert said.returncode == 2
    assert [line.split(":")[0] for line in said.stderr.splitlines()] == ["error", "hint"], said.stderr
    assert "uv tool install 'keepstep-agent[webhook]'" in said.stderr


@pytest.mark.parametrize("statement", ["from click import lost", "import click.lost", "import keepstep_agent.lost"])
def test_an_import_that_fails_for_another_reason_shows_its_traceback(statement: str) -> None:
    program = f"import keepstep_agent.cli as cli\ndef fail(**_):\n    {statement}\ncli.cli = fail\n"
    program += "from keepstep_agent.__main__ import main; main()"
    said = subprocess.run([sys.executable, "-c", program, "ls"], capture_output=True, text=True, timeout=HANG_SECONDS)
    assert said.returncode == 1
    assert "Traceback" in said.stderr
    assert "pip install" not in said.stderr


@pytest.mark.parametrize("command", sorted(cli.list_commands(click.Context(cli))))
def test_every_command_explains_itself(command: str) -> None:
    shown = keepstep(command, "--help", columns=80)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.startswith(f"Usage: keepstep {command} ")
    assert max(map(len, shown.stdout.splitlines())) <= 80

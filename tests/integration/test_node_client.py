"""The example in Node.js, made only from agent.proto: the very file that a person would copy, beside a real agent."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Self

import pytest
from tests.harness.agent_process import AgentProcess, tree, wait_until
from tests.harness.bounds import HANG_SECONDS
from tests.harness.bucket_view import BucketView
from tests.harness.run_process import RunProcess
from tests.servers.server import Bucket

FOLDER = Path(__file__).parents[2] / "examples" / "node"
PROGRAM = FOLDER / "train.mjs"
ENDLESS = 10**12


def _missing() -> str:
    """What to do before these tests can run; empty when they can."""
    if shutil.which("node") is None:
        return "Node.js is not installed: apt install nodejs npm, then make node"
    if not (FOLDER / "node_modules").is_dir():
        return "the example's npm packages are not installed: make node"
    return ""


pytestmark = pytest.mark.skipif(bool(_missing()), reason=_missing())


class NodeProcess:
    """The example as a process of its own; its lines are its events."""

    def __init__(self, volume: Path, *, steps: int = ENDLESS, save_every: int = 0, **environment: object) -> None:
        self._log = volume.parent / f"{volume.name}.node.log"
        ours = {name: value for name, value in os.environ.items() if not name.startswith("KEEPSTEP_")}
        self._environment = (
            ours | {"KEEPSTEP_VOLUME": str(volume)} | {name: str(environment[name]) for name in environment}
        )
        self._command = ["node", str(PROGRAM), f"--steps={steps}", f"--save-every={save_every}"]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(self._command, env=self._environment, stdout=log, stderr=log)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait(HANG_SECONDS)

    def output(self) -> str:
        return self._log.read_text()

    def events(self, event: str) -> list[str]:
        """Its whole lines of one event."""
        lines = [line for line in self.output().splitlines(keepends=True) if line.endswith("\n")]
        return [line.strip() for line in lines if line.startswith(f"{event} ")]

    def wait_event(self, event: str, text: str = "") -> str:
        """The first line of this event with this text in it, once it is there."""

        def found() -> list[str]:
            return [line for line in self.events(event) if text in line]

        def holds() -> bool:
            assert found() or self._process is None or self._process.poll() is None, self.output()
            return bool(found())

        wait_until(holds, HANG_SECONDS, f"{event} {text}")
        return found()[0]

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def wait(self) -> int:
        """Its exit code."""
        assert self._process is not None
        return self._process.wait(HANG_SECONDS)


def _agent(volume: Path, bucket: Bucket) -> AgentProcess:
    return AgentProcess(volume, bucket.destination, endpoint_url=bucket.endpoint_url)


def _value(line: str, name: str) -> str:
    return next(word for word in line.split() if word.startswith(f"{name}=")).partition("=")[2]


def _leaves(agent: AgentProcess) -> None:
    """As a pod ends: the trainer is gone, and the agent drains and exits, with nothing left behind."""
    agent.terminate()
    assert agent.wait(HANG_SECONDS) == 0, agent.log_text()


def _stored_steps(bucket: Bucket) -> list[int]:
    """The committed checkpoints, the newest first; every byte of them was read back."""
    rows = BucketView(bucket).verify()
    assert [row["problems"] for row in rows] == [[]] * len(rows)
    return [row["step"] for row in rows]


def test_a_node_program_announces_its_checkpoints_and_sees_them_committed(
    tmp_path: Path, rclone_bucket: Bucket
) -> None:
    volume = tmp_path / "volume"
    with _agent(volume, rclone_bucket), NodeProcess(volume, steps=3000, save_every=2000) as node:
        assert node.wait() == 0, node.output()
        assert "name=checkpoint-2000 kind=KIND_PERIODIC" in node.events("saved")[0]
        committed = node.events("committed")[-1]
        assert _value(committed, "name") == "checkpoint-3000"
        assert node.events("done")
    assert _stored_steps(rclone_bucket)[0] == 3000
    local = volume / "checkpoints" / "checkpoint-3000"
    assert tree(BucketView(rclone_bucket).restore(tmp_path / "other")) == tree(local)


def test_a_signalled_node_program_saves_just_in_time_and_its_agent_commits_that(
    tmp_path: Path, rclone_bucket: Bucket
) -> None:
    volume = tmp_path / "volume"
    with _agent(volume, rclone_bucket) as agent, NodeProcess(volume) as node:
        node.wait_event("attached")
        node.wait_event("begin")
        node.signal(signal.SIGTERM)
        assert node.wait() == 143, node.output()
        step = _value(node.events("leave")[0], "step")
        assert node.events("saved") == [f"saved name=checkpoint-{step} kind=KIND_JUST_IN_TIME"]
        # It was told of the notice by the program alone.
        assert agent.status().terminating
        _leaves(agent)
        assert agent.log("checkpoint.announced")[0]["kind"] == "just-in-time"
    assert _stored_steps(rclone_bucket) == [int(step)]


def test_a_node_program_hears_by_attach_that_it_shall_save_and_that_its_pod_ends(
    tmp_path: Path, rclone_bucket: Bucket
) -> None:
    volume = tmp_path / "volume"
    with _agent(volume, rclone_bucket) as agent, NodeProcess(volume) as node:
        node.wait_event("attached")
        node.wait_event("begin")
        asked = subprocess.run(
            [sys.executable, "-m", "keepstep_agent", "save", f"--volume={volume}", "--json"],
            capture_output=True,
            text=True,
            timeout=HANG_SECONDS,
            check=True,
        )
        assert json.loads(asked.stdout)["ranks"] == 1
        saved = _value(node.wait_event("saved", "KIND_PERIODIC"), "name")
        node.wait_event("committed", f"name={saved} ")
        agent.notify_termination(grace_seconds=60)
        assert node.wait() == 143, node.output()
        assert [_value(line, "to") for line in node.events("asked")] == ["save", "stop"]
        _leaves(agent)
    last = _value(node.events("leave")[0], "step")
    assert _stored_steps(rclone_bucket) == [int(last), int(saved.removeprefix("checkpoint-"))]


@pytest.mark.nightly
def test_a_node_program_stopped_under_keepstep_run_goes_on_bit_identical_on_a_new_disk(
    short_directory: Path, rclone_bucket: Bucket
) -> None:
    def run(volume: str, *arguments: str) -> RunProcess:
        return RunProcess(
            short_directory / volume,
            rclone_bucket.destination,
            command=("node", str(PROGRAM), *arguments),
            endpoint_url=rclone_bucket.endpoint_url,
        )

    with run("one", f"--steps={ENDLESS}", "--save-every=0") as first:
        wait_until(lambda: "\nattached " in first.output(), HANG_SECONDS, "the agent is there")
        wait_until(lambda: "\nbegin step=0\n" in first.output(), HANG_SECONDS, "the training begins")
        first.signal(signal.SIGTERM)
        assert first.wait() == 143, first.output()
    (step,) = _stored_steps(rclone_bucket)
    with run("two", f"--steps={step + 50}") as second:
        assert second.wait() == 0, second.output()
    assert f"\nbegin step={step}\n" in second.output()
    with NodeProcess(short_directory / "alone", steps=step + 50) as uninterrupted:
        assert uninterrupted.wait() == 0
    assert f"\n{uninterrupted.events('done')[0]}\n" in second.output()


def test_a_node_program_without_an_agent_says_so_once_and_trains_on_until_there_is_one(
    tmp_path: Path, rclone_bucket: Bucket
) -> None:
    volume = tmp_path / "volume"
    with NodeProcess(volume, save_every=50_000) as node:
        assert "keepstep run --to" in node.wait_event("no-answer", "ENOENT")
        node.wait_event("saved")
        with _agent(volume, rclone_bucket) as agent:
            node.wait_event("committed")
            node.signal(signal.SIGTERM)
            assert node.wait() == 143, node.output()
            _leaves(agent)
        assert len(node.events("no-answer")) == 1


def test_a_node_program_without_an_agent_ends_by_itself_with_its_checkpoint_on_the_disk(tmp_path: Path) -> None:
    with NodeProcess(tmp_path / "volume", steps=100) as node:
        assert node.wait() == 0, node.output()
        assert len(node.events("no-answer")) == 1
    assert (tmp_path / "volume" / "checkpoints" / "checkpoint-100" / "state.json").exists()


@pytest.mark.nightly
def test_an_agent_that_accepts_and_never_answers_does_not_hold_a_node_program(short_directory: Path) -> None:
    path = short_directory / "deaf.sock"
    with socket.socket(socket.AF_UNIX) as deaf:
        deaf.bind(str(path))
        deaf.listen()
        with NodeProcess(short_directory / "volume", steps=100, save_every=10, KEEPSTEP_SOCKET=path) as node:
            assert node.wait() == 0, node.output()
            assert len(node.events("no-answer")) == 1
            assert len(node.events("saved")) == 10


def test_a_refused_announcement_gives_the_reason_and_the_hint_and_training_goes_on(
    tmp_path: Path, rclone_bucket: Bucket
) -> None:
    volume = tmp_path / "volume"
    outside = tmp_path / "outside"
    with (
        _agent(volume, rclone_bucket),
        NodeProcess(volume, steps=100, save_every=50, KEEPSTEP_CHECKPOINT_DIRECTORY=outside) as node,
    ):
        assert node.wait() == 0, node.output()
        for line in node.events("refused"):
            assert "call=AnnounceCheckpoint reason=PATH_OUTSIDE_VOLUME" in line
            assert "(save into the shared volume" in line
        assert len(node.events("refused")) == 2


def test_a_socket_below_a_strange_path_is_found(short_directory: Path, rclone_bucket: Bucket) -> None:
    volume = short_directory / "a b#c?d%41:ü"
    with _agent(volume, rclone_bucket), NodeProcess(volume, steps=10) as node:
        assert node.wait() == 0, node.output()
        assert _value(node.events("committed")[0], "name") == "checkpoint-10"


def test_a_path_too_long_for_a_socket_is_refused_in_words(tmp_path: Path) -> None:
    with NodeProcess(tmp_path / "volume", steps=10, KEEPSTEP_SOCKET=tmp_path / ("x" * 100)) as node:
        assert node.wait() == 2
        assert "KEEPSTEP_SOCKET" in node.events("error")[0]

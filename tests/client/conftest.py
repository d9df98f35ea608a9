"""What the client's tests share: an agent that can be scripted, and processes that end with the test."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.client.agent_server import AgentServer, serving
from tests.harness.bounds import HANG_SECONDS

from keepstep import Checkpointer
from keepstep.agent_client import channel
from keepstep_api import names

ENVIRONMENT = (
    names.ENV_VOLUME,
    names.ENV_CHECKPOINT_DIRECTORY,
    names.ENV_SOCKET,
    names.ENV_ATTEMPT,
    "WORLD_SIZE",
)
TRAINER = Path(__file__).with_name("trainer.py")


def set_deadlines(monkeypatch: pytest.MonkeyPatch, call_seconds: float, announce_seconds: float) -> None:
    """Of calls to the agent."""
    defaults = channel.Channel._call.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "deadline_seconds", call_seconds)
    monkeypatch.setattr(channel, "ANNOUNCE_SECONDS", announce_seconds)


@pytest.fixture(autouse=True)
def _no_keepstep_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def _an_answer_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that answers is never away, however slow the machine; who tests one that hangs sets its deadlines."""
    set_deadlines(monkeypatch, HANG_SECONDS, HANG_SECONDS)


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    return tmp_path / "v"


@pytest.fixture
def agent(volume: Path) -> Iterator[AgentServer]:
    with serving(volume / names.STATE_DIRECTORY / names.SOCKET, AgentServer()) as server:
        yield server


@pytest.fixture
def make_checkpointer(volume: Path) -> Iterator[Callable[..., Checkpointer]]:
    before = signal.getsignal(signal.SIGTERM)
    made: list[Checkpointer] = []

    def make(**arguments: object) -> Checkpointer:
        made.append(Checkpointer(**{"volume": volume, **arguments}))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for checkpointer in reversed(made):
        checkpointer.close()
        if checkpointer._session._sigterm.held:
            # It has left, in a process that stays.
            checkpointer._session._sigterm.close()
    assert signal.getsignal(signal.SIGTERM) == before


class Trainer:
    """A real training process, one step per `step()`."""

    def __init__(self, volume: Path, *, stdout: int = subprocess.PIPE, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(TRAINER)],
            env={**os.environ, names.ENV_VOLUME: str(volume), "STEPS": "1000", "EVERY": "10", **environment},
            stdin=subprocess.PIPE,
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
        )

    def step(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self) -> tuple[int, str]:
        """(exit code, standard error) once it has left by itself."""
        _, errors = self.process.communicate(timeout=HANG_SECONDS)
        return self.process.returncode, errors

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=HANG_SECONDS)


@pytest.fixture
def start_trainer(volume: Path) -> Iterator[Callable[..., Trainer]]:
    started: list[Trainer] = []

    def start(**options: Any) -> Trainer:
        started.append(Trainer(volume, **options))
        return started[-1]

    yield start
    for trainer in started:
        if trainer.process.poll() is None:
            trainer.kill()

"""What the tests of the integrations share."""

import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.client.agent_server import AgentServer, serving
from tests.client.conftest import set_deadlines
from tests.harness.bounds import HANG_SECONDS

from keepstep.gate.sigterm import Sigterm
from keepstep_api import names


@pytest.fixture(autouse=True)
def _an_answer_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that answers is never away, however slow the machine."""
    set_deadlines(monkeypatch, HANG_SECONDS, HANG_SECONDS)


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[AgentServer]:
    with serving(tmp_path / "v" / names.STATE_DIRECTORY / names.SOCKET, AgentServer()) as server:
        yield server


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    return tmp_path / "v"


@pytest.fixture
def other_filesystem(volume: Path) -> Iterator[Path]:
    """A folder from which no file can be linked into the volume."""
    volume.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        if Path(folder).stat().st_dev == volume.stat().st_dev:
            pytest.skip("/dev/shm and the folder of temporary files are one filesystem")
        yield Path(folder)


@contextmanager
def leaving(code: int = names.JUST_IN_TIME_EXIT_CODE) -> Iterator[None]:
    """What is done inside leaves after a just-in-time save: its process would end, and this one stays."""
    with pytest.raises(SystemExit) as left:
        yield
    assert left.value.code == code
    sigterm = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    assert isinstance(sigterm, Sigterm)
    assert sigterm.held, "a further SIGTERM would end it in another way"
    sigterm.close()

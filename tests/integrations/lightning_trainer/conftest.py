"""One process of Lightning's Trainer on a volume of its own."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import keepstep.gate.signal_file
from keepstep.framework_run import FrameworkRun
from keepstep.integrations import ownership
from keepstep_api import names


@pytest.fixture(autouse=True)
def _process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Each test is a process of its own, as far as the integration knows, and so is each Trainer: see `make`."""
    for name in (names.ENV_CHECKPOINT_DIRECTORY, names.ENV_SOCKET, names.ENV_ATTEMPT):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setenv(names.ENV_VOLUME, str(tmp_path / "v"))
    monkeypatch.setattr(keepstep.gate.signal_file, "_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(ownership, "_outermost", None)
    monkeypatch.setattr(FrameworkRun, "_trained", set())
    before = signal.getsignal(signal.SIGTERM)
    yield
    assert signal.getsignal(signal.SIGTERM) == before, "training gives SIGTERM back"

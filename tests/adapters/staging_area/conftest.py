"""A volume with a checkpoint on it, and the staging area there."""

from pathlib import Path

import pytest

from keepstep_agent.adapters.volume.staging_area import LocalStagingArea


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    volume = tmp_path / "volume"
    volume.mkdir()
    return volume


@pytest.fixture
def area(volume: Path) -> LocalStagingArea:
    return LocalStagingArea(volume)


@pytest.fixture
def checkpoint(volume: Path) -> Path:
    folder = volume / "checkpoints" / "checkpoint-1"
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "weights.pt").write_bytes(b"weights" * 1000)
    (folder / "state.json").write_bytes(b"{}")
    (folder / "empty").write_bytes(b"")
    return folder

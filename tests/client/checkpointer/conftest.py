"""A Checkpointer without an agent, in a directory of its own."""

from pathlib import Path

import pytest
from tests.client.checkpointer.saved_steps import Make


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def make(make_checkpointer: Make, directory: Path) -> Make:
    return lambda **arguments: make_checkpointer(volume=None, directory=directory, **arguments)

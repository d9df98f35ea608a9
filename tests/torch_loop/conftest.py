"""What these tests share: Checkpointers that end with the test, and no settings from outside."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from keepstep import Checkpointer
from keepstep_api import names


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (names.ENV_VOLUME, names.ENV_CHECKPOINT_DIRECTORY, names.ENV_SOCKET, "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


@pytest.fixture
def make_checkpointer(directory: Path) -> Iterator[Callable[..., Checkpointer]]:
    made: list[Checkpointer] = []

    def make(**arguments: Any) -> Checkpointer:
        made.append(Checkpointer(directory, keep_local=10, **arguments))
        return made[-1]

    yield make
    for checkpointer in reversed(made):
        checkpointer.close()

"""Saves of a Checkpointer, and what is on the disk and in the log after them."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from keepstep import Checkpointer

Make = Callable[..., Checkpointer]


def save(checkpointer: Checkpointer, step: int, kind: str | None = None) -> None:
    with checkpointer.save(step, kind) as path:
        (path / "state").write_text(f"state of {step}")


def local(volume: Path) -> list[str]:
    return sorted(path.name for path in (volume / "checkpoints").iterdir())


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelno >= logging.WARNING]


def visible(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.name != ".keepstep")

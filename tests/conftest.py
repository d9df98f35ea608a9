"""Fixtures that tests of several areas share."""

import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest_plugins = ["tests.servers.fixtures"]


def pytest_configure() -> None:
    # Started in the background of a shell, or by nohup, we ignore these, and so would every process that we start.
    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


@pytest.fixture
def short_directory() -> Iterator[Path]:
    """pytest's own directories are too deep for a unix socket."""
    with tempfile.TemporaryDirectory(prefix="short-") as directory:
        yield Path(directory)

"""Fixtures that tests of several areas share."""

import functools
import importlib.util
import os
import re
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import botocore.session
import pytest
from tests.harness.warm_python import TRAINER_ENVIRONMENT

from keepstep.integrations import ownership
from keepstep_api import names

# Before anything loads gRPC: beside its fork handlers a fork right after a call may hang, in this process too.
os.environ.setdefault(names.ENV_GRPC_FORK_HANDLERS, "0")
for name, value in TRAINER_ENVIRONMENT.items():
    os.environ.setdefault(name, value)

pytest_plugins = ["tests.servers.fixtures"]

_LANES = ("slow", "trainers", "root", "nightly")
_HAS_TORCH = importlib.util.find_spec("torch") is not None
_IMPORTS_TORCH = re.compile(rb"^ *(?:import|from) (?:torch|safetensors|keepstep\.torch_loop)", re.MULTILINE)


def pytest_configure() -> None:
    # Started in the background of a shell, or by nohup, we ignore these, and so would every process that we start.
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    # Looking for a program in a folder that we may not search gives PermissionError, which DeepSpeed, for one, is not
    # ready for. Root's PATH may have such folders when an ordinary user runs the tests.
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    os.environ["PATH"] = os.pathsep.join(folder for folder in folders if os.access(folder, os.X_OK))


def pytest_report_header() -> str:
    return "" if _HAS_TORCH else "torch is not installed: tests that import it are left out"


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """On a Python that torch has no wheel for, everything else is tested."""
    if _HAS_TORCH or collection_path.suffix != ".py":
        return None
    return bool(_IMPORTS_TORCH.search(collection_path.read_bytes())) or None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of the long tests those that may take longest begin first, so that none of them is left alone at the end."""
    items.sort(key=_limit_seconds, reverse=True)
    # Else the Makefile, which looks for it there, would not run them in any lane.
    for item in items:
        for lane in _LANES:
            if item.get_closest_marker(lane) and not _names(item, lane):
                raise pytest.UsageError(f"{item.nodeid}: neither its file nor a conftest.py beside it says {lane}")


def _names(item: pytest.Item, lane: str) -> bool:
    words = (f"mark.{lane}", f"import {lane}")
    return any(word in _text(path) for word in words for path in (item.path, item.path.with_name("conftest.py")))


@functools.cache
def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _limit_seconds(item: pytest.Item) -> float:
    """The limit of a long test; 0 for all others, which keep their order."""
    limit = item.get_closest_marker("timeout")
    is_long = item.get_closest_marker("slow") or item.get_closest_marker("trainers")
    return float(limit.args[0]) if limit and is_long else 0.0


@pytest.fixture(scope="session", autouse=True)
def _service_descriptions_read_once() -> Iterator[None]:
    """Every session of botocore reads a megabyte of them, which takes longer than most tests with a store."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(botocore.session, "create_loader", functools.cache(botocore.session.create_loader))
        yield


@pytest.fixture
def short_directory() -> Iterator[Path]:
    """pytest's own directories are too deep for a unix socket."""
    with tempfile.TemporaryDirectory(prefix="short-") as directory:
        yield Path(directory)


@pytest.fixture(autouse=True)
def _nobody_trains_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer made in pytest's own process claims that process for good."""
    monkeypatch.setattr(ownership, "_outermost", None)

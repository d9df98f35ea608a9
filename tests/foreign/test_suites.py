"""The frameworks' own tests of their checkpoints that pass alone pass with Keepstep too.

Accelerate's come with its sources from PyPI. Those of Lightning and transformers are in no package: LIGHTNING_CHECKOUT
and TRANSFORMERS_CHECKOUT name checkouts of the releases that are installed.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

import pytest
from tests.foreign.downloads import installed_into, sources

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(7200)]
SECONDS = 3500


def test_accelerate(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    suite = sources(tmp_path, "accelerate", version("accelerate"))
    # Its tests import it.
    installed_into(tmp_path / "libraries", "parameterized==0.9.0")
    compare(suite, tmp_path, "tests/test_state_checkpointing.py", "tests/test_accelerator.py")


def test_lightning(tmp_path: Path) -> None:
    suite = checkout("LIGHTNING_CHECKOUT")
    for library in ("cloudpickle==3.1.2", "jsonargparse==4.53.0"):
        installed_into(tmp_path / "libraries", library)
    folder = "tests/tests_pytorch"
    compare(suite, tmp_path, f"{folder}/checkpointing", f"{folder}/callbacks", f"{folder}/loops")


def test_transformers(tmp_path: Path) -> None:
    compare(checkout("TRANSFORMERS_CHECKOUT"), tmp_path, "tests/trainer")


def checkout(variable: str) -> Path:
    if variable not in os.environ:
        pytest.skip(f"{variable} names no checkout")
    return Path(os.environ[variable])


def compare(suite: Path, folder: Path, *tests: str) -> None:
    alone = passed(suite, folder / "alone.xml", (), tests)
    # A short name: a socket lies below it.
    volume = folder / "v"
    kept = (sys.executable, "-m", "keepstep_agent", "run", "--to", f"file://{folder / 'store'}", "--volume")
    mine = passed(suite, folder / "kept.xml", (*kept, str(volume), "--autoload", "--"), tests)
    assert sorted(alone - mine) == []


def passed(suite: Path, report: Path, prefix: Sequence[str], tests: Sequence[str]) -> set[str]:
    """Return which of the tests pass."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KEEPSTEP_")}
    environment["PYTHONPATH"] = str(report.with_name("libraries"))
    options = ("-q", "-p", "no:cacheprovider", "--continue-on-collection-errors", f"--junitxml={report}")
    words = (sys.executable, "-m", "pytest", *options, *tests)
    ended = subprocess.run(
        (*prefix, *words), cwd=suite, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert report.exists(), ended.stdout[-3000:] + ended.stderr[-3000:]
    cases = [*ElementTree.parse(report).getroot().iter("testcase")]
    print(f"{len(cases)} tests", ended.stdout[-300:])
    found = {f"{case.get('classname')}.{case.get('name')}" for case in cases if not len(case)}
    assert found
    return found

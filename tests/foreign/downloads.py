"""What these tests need of PyPI and is in no group of ours: brought when they run, and never kept."""

import subprocess
import sys
from pathlib import Path

import pytest
from tests.harness.bounds import HANG_SECONDS


def installed_into(folder: Path, requirement: str) -> Path:
    """Install one package into an empty folder. Skips where it cannot be had."""
    pip(
        f"{requirement} could not be installed", "install", "--quiet", "--no-deps", "--target", str(folder), requirement
    )
    return folder


def sources(folder: Path, name: str, version: str) -> Path:
    """Return the unpacked source package of a release. Skips where it cannot be had."""
    words = ("download", "--quiet", "--no-deps", "--no-binary", name, "--dest", str(folder), f"{name}=={version}")
    pip(f"the sources of {name} {version} could not be downloaded", *words)
    (archive,) = folder.glob("*.tar.gz")
    subprocess.run(["tar", "-xzf", archive, "-C", folder], check=True, timeout=HANG_SECONDS)
    return folder / archive.name.removesuffix(".tar.gz")


def pip(failure: str, *words: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "pip", *words], capture_output=True, text=True, timeout=HANG_SECONDS, check=False
    )
    if ended.returncode != 0:
        pytest.skip(f"{failure}: {ended.stderr[-300:]}")

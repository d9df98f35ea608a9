"""A volume of a given size: a tmpfs of its own, for what happens when there is no room or no leave to write."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.harness.bounds import HANG_SECONDS


@contextmanager
def mounted(directory: Path, size_bytes: int) -> Iterator[Path]:
    """`directory` as an empty volume of that size; skips the test where nobody may mount."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a volume of limited size")
    directory.mkdir()
    result = _run("mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(directory))
    if result.returncode:
        pytest.skip(f"this machine lets not even root mount a tmpfs: {result.stderr.strip()}")
    try:
        yield directory
    finally:
        # Lazily: a failed test may leave a file of it open, and nobody shall inherit the mount.
        _run("umount", "--lazy", str(directory))


def remount(directory: Path, mode: str) -> None:
    """`mode` is ro or rw."""
    result = _run("mount", "-o", f"remount,{mode}", str(directory))
    assert not result.returncode, result.stderr


def _run(*command: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)

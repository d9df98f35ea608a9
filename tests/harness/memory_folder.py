"""A folder on a filesystem in memory, where pages and their times behave as no disk's do."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from keepstep_agent.adapters.volume import content_check


@contextmanager
def folder_in_memory() -> Iterator[Path]:
    """Gone afterwards. Skips the test where the machine has none."""
    folder = Path("/dev/shm") / f"keepstep-test-{os.getpid()}"
    if not folder.parent.is_dir() or not content_check._is_in_memory(folder.parent.stat().st_dev):
        pytest.skip("needs a filesystem in memory at /dev/shm")
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder)

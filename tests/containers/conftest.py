"""The image, built once for all tests of this folder."""

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.containers.engine import Engine, missing_tools
from tests.containers.image import ROOT, NoNetworkError, build_image
from tests.harness.bounds import HANG_SECONDS

_CACHE = ROOT / ".tools" / "containers"


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    if missing_tools():
        pytest.skip(missing_tools())
    directory = Path(tempfile.mkdtemp(prefix="pods-"))
    engine = Engine(directory)
    try:
        try:
            build_image(engine, _CACHE, directory)
        except NoNetworkError as error:
            pytest.skip(str(error))
        yield engine
    finally:
        # Its own containers alone are in its own storage.
        engine.podman("rm", "--all", "--force", "--time=0")
        for mount in _mounts_below(directory):
            subprocess.run(["umount", mount], check=False, timeout=HANG_SECONDS)
        shutil.rmtree(directory, ignore_errors=True)


def _mounts_below(directory: Path) -> list[str]:
    """The innermost first."""
    points = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    return sorted((point for point in points if Path(point).is_relative_to(directory)), reverse=True)

"""buildah and podman with a storage of their own: what a test makes here is nobody else's, and is gone with it.

They build and run inside another container too, as CI's machines often are: without systemd and cgroup limits that only
crun knows, and without overlay mounts, where those are not allowed.
"""

import functools
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.harness.bounds import HANG_SECONDS

PACKAGES: Final = ("debootstrap", "buildah", "podman", "conmon", "runc")
_POLITE: Final = ("nice",)


@functools.cache
def missing_tools() -> str:
    """Why there are no containers here; empty text where there are."""
    if os.geteuid() != 0:
        return "only root can build images and run containers of any user"
    absent = [name for name in PACKAGES if not shutil.which(name)]
    return f"not installed: apt install {' '.join(absent)}" if absent else ""


class Engine:
    """`directory` must be short: conmon's unix sockets are in it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        driver = "overlay" if _mounts_overlays(directory) else "vfs"
        self._storage = [f"--root={directory}/root", f"--runroot={directory}/run", f"--storage-driver={driver}"]

    def buildah(self, *arguments: str, timeout_seconds: float = HANG_SECONDS) -> str:
        """Its standard output; AssertionError with all it said if it fails."""
        return self._output(["buildah", *self._storage, *arguments], timeout_seconds)

    def podman(self, *arguments: str, timeout_seconds: float = HANG_SECONDS) -> str:
        """The same."""
        return self._output(self.podman_command(*arguments), timeout_seconds)

    def podman_command(self, *arguments: str) -> list[str]:
        own = ["--runtime=runc", "--cgroup-manager=cgroupfs", "--events-backend=none"]
        return ["podman", *self._storage, *own, *arguments]

    def _output(self, command: Sequence[str], timeout_seconds: float) -> str:
        result = subprocess.run(
            [*_POLITE, *command],
            capture_output=True,
            text=True,
            timeout=timeout_seconds,
            check=False,
            stdin=subprocess.DEVNULL,
            # conmon writes a file `oom` where it was started.
            cwd=self._directory,
        )
        assert not result.returncode, f"{' '.join(command)}: {result.stdout[-4000:]}{result.stderr[-4000:]}"
        return result.stdout


def _mounts_overlays(directory: Path) -> bool:
    folders = {name: directory / f"overlay-{name}" for name in ("lower", "upper", "work", "merged")}
    for folder in folders.values():
        folder.mkdir()
    options = f"lowerdir={folders['lower']},upperdir={folders['upper']},workdir={folders['work']}"
    merged = str(folders["merged"])
    command = ["mount", "-t", "overlay", "overlay", "-o", options, merged]
    mounted = subprocess.run(command, check=False, capture_output=True, timeout=HANG_SECONDS).returncode == 0
    if mounted:
        subprocess.run(["umount", merged], check=True, timeout=HANG_SECONDS)
    return mounted

"""Builds the image as a user does, from `Dockerfile.agent`, on a bare Debian that debootstrap makes.

Nothing is fetched from an image registry. The packages come as this machine's pip gets them, in a wheelhouse.
"""

import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from tests.containers.engine import Engine

ROOT: Final = Path(__file__).parents[2]
IMAGE: Final = "localhost/keepstep"
BASE: Final = "localhost/base"
BASE_DIGEST: Final = f"sha256:{'0' * 64}"
"""Not its own: what a release names is in the labels."""
_LOCKS: Final = ("requirements.txt", "requirements-build.txt")
_RELEASE: Final = "bookworm"
_PYTHON_OF_RELEASE: Final = "3.11"
_GLIBC_MINOR_OF_RELEASE: Final = 36
_FETCH_SECONDS: Final = 900.0
_BUILD_SECONDS: Final = 1200.0


class NoNetworkError(Exception):
    """Neither here nor fetchable: the packages of Debian or of Python."""


def build_image(engine: Engine, cache: Path, directory: Path) -> None:
    """`cache` keeps what was fetched for the next run; `directory` is empty and ours. Raises NoNetworkError."""
    container = engine.buildah("from", "scratch").strip()
    engine.buildah("add", "--quiet", container, str(_debian(cache)), "/")
    engine.buildah("commit", "--quiet", container, BASE)
    engine.buildah("rm", container)
    context = directory / "context"
    # By .dockerignore everything else stays out anyway; a checkout may hold gigabytes of it.
    for name in ("agent", "client", "proto"):
        shutil.copytree(ROOT / name, context / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("Dockerfile.agent", ".dockerignore", "pyproject.toml", *_LOCKS, "LICENSE"):
        shutil.copy(ROOT / name, context)
    shutil.copytree(_wheelhouse(cache), context / "wheelhouse")
    arguments = ["--isolation=chroot", f"--build-arg=BASE_IMAGE={BASE}", f"--tag={IMAGE}"]
    arguments += [f"--build-arg=BASE_DIGEST={BASE_DIGEST}"]
    file = f"--file={context / 'Dockerfile.agent'}"
    engine.buildah("bud", "--quiet", *arguments, file, str(context), timeout_seconds=_BUILD_SECONDS)


def _debian(cache: Path) -> Path:
    """A tar of the smallest system, without Python."""
    archive = cache / f"{_RELEASE}.tar"
    if not archive.exists():
        cache.mkdir(parents=True, exist_ok=True)
        tree, partial = cache / f"{_RELEASE}.tree", cache / f"{_RELEASE}.partial"
        shutil.rmtree(tree, ignore_errors=True)
        try:
            _fetch(["debootstrap", "--variant=minbase", _RELEASE, str(tree)])
            _fetch(["tar", "-C", str(tree), "--exclude=./var/cache/apt/archives/*.deb", "-cf", str(partial), "."])
        finally:
            shutil.rmtree(tree, ignore_errors=True)
        partial.rename(archive)
    return archive


def _wheelhouse(cache: Path) -> Path:
    """Wheels for that system's Python, whatever ours is: those of the locks, by their hashes."""
    wheels = cache / "wheelhouse"
    stamp, content = wheels / "fetched", "".join((ROOT / name).read_text() for name in _LOCKS)
    if not stamp.exists() or stamp.read_text() != content:
        shutil.rmtree(wheels, ignore_errors=True)
        fits = [
            f"--platform=manylinux_2_{minor}_{platform.machine()}" for minor in range(_GLIBC_MINOR_OF_RELEASE, 16, -1)
        ]
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:", *fits]
        command += [f"--python-version={_PYTHON_OF_RELEASE}", "--implementation=cp", f"--dest={wheels}"]
        _fetch([*command, "--require-hashes", *(f"--requirement={ROOT / name}" for name in _LOCKS)])
        stamp.write_text(content)
    return wheels


def _fetch(command: list[str]) -> None:
    result = subprocess.run(
        ["nice", *command],
        capture_output=True,
        text=True,
        timeout=_FETCH_SECONDS,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    if result.returncode:
        raise NoNetworkError(f"{command[0]} failed: {result.stdout[-500:]}{result.stderr[-500:]}")

"""Prepares autoload: the environment for `--autoload`, and the files for a pod whose trainer's image has no Keepstep.

Not in `run`, which needs gRPC: a restore is to load as little as it can.
"""

import os
import shutil
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from keepstep_agent.adapters.volume.errors import folder_error
from keepstep_agent.core.errors import ErrorKind, KeepstepError

_PACKAGES = ("keepstep", "keepstep_api")
_FOLDER = Path("autoload", "path")
# As `keepstep.autoload.own_copies` calls it. A folder of its own: the trainer's own packages come first.
_VENDOR = "vendor"
_CODE_ALONE = shutil.ignore_patterns("__pycache__", "*.pyi", "*.pxd", "*.pyx")


def autoload_folder() -> str:
    """Return the client's folder for PYTHONPATH."""
    return str(_package("keepstep") / _FOLDER)


def with_autoload(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment with the client's autoload folder first on PYTHONPATH."""
    folder = autoload_folder()
    # An empty entry would mean the working directory.
    users = environment.get("PYTHONPATH")
    return {**environment, "PYTHONPATH": os.pathsep.join([folder, users]) if users else folder}


def copy_autoload(to: Path) -> None:
    """Make `to` a folder for PYTHONPATH with everything that another interpreter needs.

    grpcio and protobuf go where only a client that finds no others looks for them. gRPC's extension module is for this
    version of Python alone; protobuf's is not copied, as it can do without.

    Raises KeepstepError, also if `to` has other files: one of them may be a sitecustomize of the user's.
    """
    _refuse_strange(to)
    vendor = to / _VENDOR
    try:
        for name in _PACKAGES:
            _copy(_package(name), to / name)
        _copy(_package("grpc"), vendor / "grpc")
        _copy(_package("google.protobuf"), vendor / "google" / "protobuf")
        shutil.copyfile(_origin("typing_extensions"), vendor / "typing_extensions.py")
        for file in (to / "keepstep" / _FOLDER).iterdir():
            shutil.copyfile(file, to / file.name)
    except shutil.Error as error:
        raise folder_error(OSError(0, str(error)), f"cannot copy autoload to {to}") from error
    except OSError as error:
        raise folder_error(error, f"cannot copy autoload to {to}") from error


def _refuse_strange(to: Path) -> None:
    """Raise KeepstepError unless the folder is new, empty or of an earlier copy, which begins with our package."""
    try:
        is_strange = to.exists() and not (to / _PACKAGES[0]).is_dir() and any(to.iterdir())
    except OSError as error:
        raise folder_error(error, f"cannot copy autoload to {to}") from error
    if is_strange:
        raise KeepstepError(
            ErrorKind.BAD_CONFIGURATION,
            f"cannot copy autoload to {to}: it has files that Keepstep did not write",
            hint="give an empty directory",
        )


def _copy(package: Path, to: Path) -> None:
    shutil.copytree(package, to, dirs_exist_ok=True, ignore=_CODE_ALONE, copy_function=shutil.copyfile)


def _package(name: str) -> Path:
    """Return a package's folder without importing it: the agent never imports the client."""
    return _origin(name).parent


def _origin(name: str) -> Path:
    found = find_spec(name)
    assert found is not None, "the agent's distribution requires it"
    assert found.origin
    return Path(found.origin)

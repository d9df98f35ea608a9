"""Prepares autoload: the environment for `--autoload`, and the files for a pod whose trainer's image has no Mooring.

Not in `run`, which needs gRPC: a restore is to load as little as it can.
"""

import os
import shutil
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from mooring_agent.adapters.volume.errors import folder_error

_FOLDER = Path("autoload", "path")


def with_autoload(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment with the client's autoload folder first on PYTHONPATH."""
    folder = str(_package("mooring") / _FOLDER)
    # An empty entry would mean the working directory.
    users = environment.get("PYTHONPATH")
    return {**environment, "PYTHONPATH": os.pathsep.join([folder, users]) if users else folder}


def copy_autoload(to: Path) -> None:
    """Make `to` a folder for PYTHONPATH with everything that another interpreter needs, except grpcio and protobuf.

    Compiled files are not copied: they are for this version of Python. Raises MooringError.
    """
    try:
        for name in ("mooring", "mooring_api"):
            shutil.copytree(
                _package(name),
                to / name,
                dirs_exist_ok=True,
                ignore=shutil.ignore_patterns("__pycache__"),
                copy_function=shutil.copyfile,
            )
        for file in (to / "mooring" / _FOLDER).iterdir():
            shutil.copyfile(file, to / file.name)
    except shutil.Error as error:
        raise folder_error(OSError(0, str(error)), f"cannot copy autoload to {to}") from error
    except OSError as error:
        raise folder_error(error, f"cannot copy autoload to {to}") from error


def _package(name: str) -> Path:
    """Return a package's folder without importing it: the agent never imports the client."""
    found = find_spec(name)
    assert found is not None, "the agent's distribution requires it"
    assert found.submodule_search_locations
    return Path(found.submodule_search_locations[0])

"""What protects a program's frameworks without a change to it.

Owns the environment of `mooring run --autoload`, and the files for a pod whose trainer has no Mooring in its image.
"""

import os
import shutil
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from mooring_agent.adapters.volume.errors import folder_error
from mooring_agent.core.errors import ErrorKind, MooringError

_FOLDER = Path("autoload", "path")


def with_autoload(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment with the client's autoload folder before what the user has on PYTHONPATH. Raises MooringError."""
    folder = str(_package("mooring") / _FOLDER)
    # An empty part would mean the working directory.
    users = environment.get("PYTHONPATH")
    return {**environment, "PYTHONPATH": os.pathsep.join([folder, users]) if users else folder}


def copy_autoload(to: Path) -> None:
    """Make `to` a folder for PYTHONPATH, with all that another interpreter needs but grpcio and protobuf.

    Raises MooringError. Compiled files stay behind: they are of our Python.
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
    """The folder of a package, found without importing it: the agent's side never imports the client."""
    found = find_spec(name)
    if found is None or not found.submodule_search_locations:
        raise MooringError(
            ErrorKind.BAD_CONFIGURATION,
            f"autoload needs the package {name} beside mooring_agent, and it is not there",
            hint="install it with: pip install 'mooring[agent]'",
        )
    return Path(found.submodule_search_locations[0])

"""`mooring run --autoload`: the environment in which a program's frameworks are protected without a change to it."""

import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from mooring_agent.core.errors import ErrorKind, MooringError


def with_autoload(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment with the client's autoload folder before what the user has on PYTHONPATH. Raises MooringError."""
    # Found without importing it: the agent's side never imports the client.
    client = find_spec("mooring")
    if client is None or not client.submodule_search_locations:
        raise MooringError(
            ErrorKind.BAD_CONFIGURATION,
            "--autoload needs the package mooring beside mooring_agent, and it is not there",
            hint="install it with: pip install 'mooring[agent]'",
        )
    folder = str(Path(client.submodule_search_locations[0]) / "autoload" / "path")
    # An empty part would mean the working directory.
    users = environment.get("PYTHONPATH")
    return {**environment, "PYTHONPATH": os.pathsep.join([folder, users]) if users else folder}

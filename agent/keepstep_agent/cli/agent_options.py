"""Finds the running agent that a command is for: by --volume, --socket, or the environment."""

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from keepstep_agent.cli.formatting import errors_reported
from keepstep_agent.core.errors import ErrorKind, KeepstepError
from keepstep_api.names import ENV_SOCKET, ENV_VOLUME, RUN_VOLUME, SOCKET, STATE_DIRECTORY


def agent_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add --volume and --socket. The command gets the path of the agent's socket as `socket`."""

    @click.option(
        "--volume",
        metavar="PATH",
        help=f"The agent's volume.  [default: ./{RUN_VOLUME} where `keepstep run` was used; env: {ENV_VOLUME}]",
    )
    @click.option("--socket", metavar="PATH", help=f"The agent's unix socket.  [env: {ENV_SOCKET}]")
    @functools.wraps(command)
    def wrapper(*, socket: str | None, volume: str | None, **values: Any) -> None:
        with errors_reported():
            found = _find_socket(socket, volume)
        command(socket=found, **values)

    return wrapper


def _find_socket(socket: str | None, volume: str | None) -> str:
    """Return the socket from the flags, else the environment, else the working directory. Raises KeepstepError."""
    if not socket and not volume:
        socket, volume = os.environ.get(ENV_SOCKET), os.environ.get(ENV_VOLUME)
        if not volume and Path(RUN_VOLUME, STATE_DIRECTORY).is_dir():
            volume = RUN_VOLUME
    if socket:
        return socket
    if volume:
        return str(Path(volume).absolute() / STATE_DIRECTORY / SOCKET)
    raise KeepstepError(
        ErrorKind.BAD_CONFIGURATION,
        "cannot find an agent: neither a socket nor a volume is known",
        hint=f"give --volume or --socket, run this where `keepstep run` was started, "
        f"or set {ENV_VOLUME} or {ENV_SOCKET} as in the trainer's container",
    )

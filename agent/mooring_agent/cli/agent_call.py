"""One call to a running agent from the command line."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click
import grpc

from mooring_agent.core.errors import ErrorKind, MooringError
from mooring_api.names import ENV_SOCKET, ENV_VOLUME, SOCKET, STATE_DIRECTORY
from mooring_api.socket_address import socket_address
from mooring_api.v1 import agent_pb2_grpc

CALL_TIMEOUT_SECONDS = 10.0

socket_option = click.option(
    "--socket", metavar="PATH", help=f"The agent's unix socket.  [env: {ENV_SOCKET}, or below {ENV_VOLUME}]"
)


def find_socket(given: str | None) -> str:
    """The socket from the flag or the environment. Raises MooringError."""
    volume = os.environ.get(ENV_VOLUME)
    found = given or os.environ.get(ENV_SOCKET) or (f"{volume}/{STATE_DIRECTORY}/{SOCKET}" if volume else "")
    if not found:
        raise MooringError(
            ErrorKind.BAD_CONFIGURATION,
            "no agent to talk to: neither a socket nor a volume is known",
            hint=f"give --socket, or set {ENV_SOCKET} or {ENV_VOLUME} as in the trainer's container",
        )
    return found


@contextmanager
def agent_stub(socket: str) -> Iterator[Any]:
    """A stub for `mooring.v1.Agent`; gRPC's errors come out as MooringErrors."""
    try:
        with grpc.insecure_channel(socket_address(socket)) as channel:
            yield agent_pb2_grpc.AgentStub(channel)  # type: ignore[no-untyped-call]
    except grpc.RpcError as error:
        code = error.code()
        if code is grpc.StatusCode.UNAVAILABLE:
            raise MooringError(
                ErrorKind.UNREACHABLE,
                f"no agent answers on {socket}",
                hint="is the sidecar, or `mooring run`, running? --socket names another",
            ) from error
        raise MooringError(ErrorKind.BAD_REQUEST, f"the agent refused: {error.details()}") from error

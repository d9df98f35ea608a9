"""Calls a running agent from the command line, and turns its refusals into errors."""

import socket as sockets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from keepstep_agent.core.errors import ErrorKind, KeepstepError
from keepstep_api.names import STATUS_DETAILS, socket_address
from keepstep_api.v1 import agent_pb2, agent_pb2_grpc

CALL_TIMEOUT_SECONDS = 10.0
_LOOK_TIMEOUT_SECONDS = 1.0


@contextmanager
def agent_stub(socket: str) -> Iterator[Any]:
    """Open a stub for `keepstep.v1.Agent`. Errors of gRPC are raised as KeepstepErrors."""
    try:
        with grpc.insecure_channel(socket_address(socket)) as channel:
            yield agent_pb2_grpc.AgentStub(channel)  # type: ignore[no-untyped-call]  # generated code
    except grpc.RpcError as error:
        code = error.code()
        is_answer = any(one.key == STATUS_DETAILS for one in error.trailing_metadata() or ())
        if code is grpc.StatusCode.UNAVAILABLE and not is_answer:
            raise KeepstepError(
                ErrorKind.UNREACHABLE,
                f"no agent answers on {socket}",
                hint="start the sidecar or `keepstep run`, or name another agent with --volume or --socket",
            ) from error
        raise KeepstepError(ErrorKind.BAD_REQUEST, f"the agent refused: {error.details()}") from error


def agent_answers(socket: str) -> bool:
    """Whether an agent answers on this socket. Cheap to call often: without an agent it opens no gRPC channel."""
    try:
        with sockets.socket(sockets.AF_UNIX) as probe:
            probe.settimeout(_LOOK_TIMEOUT_SECONDS)
            probe.connect(socket)
        with agent_stub(socket) as stub:
            stub.GetStatus(agent_pb2.GetStatusRequest(), timeout=_LOOK_TIMEOUT_SECONDS)
    except (OSError, KeepstepError):
        return False
    return True

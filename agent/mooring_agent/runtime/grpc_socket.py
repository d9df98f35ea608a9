"""Serves the gRPC API on the volume's unix socket; what it answers is in `grpc_server`.

Invariant: an agent that ends leaves no socket behind, and one that was left by a killed agent is taken away first.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from mooring_agent.core.errors import ErrorKind, MooringError
from mooring_agent.runtime.grpc_errors import ErrorsAnswered
from mooring_agent.runtime.grpc_server import AgentService
from mooring_api.socket_address import socket_address
from mooring_api.v1 import agent_pb2, agent_pb2_grpc

_SOCKET_MODE: Final = 0o660
_STOP_SERVING_SECONDS: Final = 0.2


@asynccontextmanager
async def serve_grpc(service: AgentService, socket: Path) -> AsyncIterator[None]:
    """The API with standard health and reflection, on a unix socket that the trainer's group may use."""
    server = grpc.aio.server(interceptors=[ErrorsAnswered()], options=[("grpc.so_reuseport", 0)])
    agent_pb2_grpc.add_AgentServicer_to_server(service, server)  # type: ignore[no-untyped-call]
    health_service = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_service, server)
    name = agent_pb2.DESCRIPTOR.services_by_name["Agent"].full_name
    reflection.enable_server_reflection([name, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
    try:
        _make_way(socket)
        server.add_insecure_port(socket_address(socket))
        await server.start()
        _share(socket)
    except (OSError, RuntimeError) as error:
        raise MooringError(
            ErrorKind.BAD_CONFIGURATION,
            f"cannot serve on the socket {socket}: {error}",
            hint="another agent may be running on this volume; or give --socket in a directory that is writable",
        ) from error
    for service_name in ("", name):
        await health_service.set(service_name, health_pb2.HealthCheckResponse.SERVING)
    try:
        yield
    finally:
        await server.stop(_STOP_SERVING_SECONDS)
        _make_way(socket)


def _share(socket: Path) -> None:
    """For the trainer's group too, whatever the umask."""
    socket.chmod(_SOCKET_MODE)


def _make_way(socket: Path) -> None:
    """Remove a socket that an earlier agent left behind."""
    socket.parent.mkdir(parents=True, exist_ok=True)
    socket.unlink(missing_ok=True)

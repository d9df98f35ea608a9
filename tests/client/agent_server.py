"""An agent for the client's tests: a real gRPC server on a real unix socket that answers, refuses, hangs or dies.

As a program, `agent_server.py <socket> <method>` is an agent that dies in the middle of that call.
"""

import os
import sys
import threading
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

from keepstep_api import names
from keepstep_api.v1 import agent_pb2, agent_pb2_grpc

# Bounds a hang. As a program of its own it has no tests.harness.
WAIT_SECONDS = 300.0


class AgentServer(agent_pb2_grpc.AgentServicer):
    """Keeps every request; what it answers is set by its attributes."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.admitted = True
        self.terminating = False
        self.api_version = names.API_VERSION
        self.keeps_objectives = True
        self.refuse_with: grpc.StatusCode | None = None
        self.die_in = ""
        self.status = agent_pb2.Status()
        self.answering = threading.Event()
        self.answering.set()

    def requests(self, method: str) -> list[Any]:
        return [request for called, request in self.calls if called == method]

    def _take(self, method: str, request: Any, context: grpc.ServicerContext) -> None:
        self.calls.append((method, request))
        if method == self.die_in:
            os._exit(1)
        self.answering.wait(WAIT_SECONDS)
        if self.refuse_with is not None:
            context.abort(self.refuse_with, "not like this")

    def Register(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        self._take("Register", request, context)
        return agent_pb2.RegisterResponse(
            agent_version="test",
            terminating=self.terminating,
            api_version=self.api_version,
            recovery_point_seconds=request.recovery_point_seconds if self.keeps_objectives else 0.0,
        )

    def BeginSave(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        self._take("BeginSave", request, context)
        if not self.admitted:
            return agent_pb2.BeginSaveResponse(admitted=False, reason="no room")
        return agent_pb2.BeginSaveResponse(admitted=True, save=request.save)

    def AnnounceCheckpoint(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        self._take("AnnounceCheckpoint", request, context)
        return agent_pb2.AnnounceCheckpointResponse(save=request.save, phase=agent_pb2.PHASE_STAGED)

    def AbortSave(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        self._take("AbortSave", request, context)
        return agent_pb2.AbortSaveResponse()

    def NotifyTermination(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        self._take("NotifyTermination", request, context)
        return agent_pb2.NotifyTerminationResponse()

    def GetStatus(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        self._take("GetStatus", request, context)
        return self.status


@contextmanager
def serving(socket: Path, servicer: AgentServer) -> Iterator[AgentServer]:
    socket.parent.mkdir(parents=True, exist_ok=True)
    server = grpc.server(futures.ThreadPoolExecutor(4))
    agent_pb2_grpc.add_AgentServicer_to_server(servicer, server)
    server.add_insecure_port(f"unix:{socket}")
    server.start()
    try:
        yield servicer
    finally:
        servicer.answering.set()
        server.stop(grace=0).wait(WAIT_SECONDS)


def main() -> None:
    servicer = AgentServer()
    servicer.die_in = sys.argv[2]
    with serving(Path(sys.argv[1]), servicer):
        print("serving", flush=True)
        threading.Event().wait(WAIT_SECONDS)


if __name__ == "__main__":
    main()

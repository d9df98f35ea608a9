"""Calls to the agent over its unix socket: open a channel, call with a deadline, close.

Owns the deadlines and the back-off from an agent that does not answer. Nothing stays open between two calls, so the
trainer may fork at any moment. gRPC's own fork handlers are switched off: they wait for gRPC's threads, which may be
ending just then and wait in turn, and the trainer would hang in fork() for ever. The handlers exist for children that
call gRPC, and here only the process that made the channel may call.
"""

import logging
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from keepstep_api import names

# gRPC reads this variable once, when it is loaded.
if "grpc" in sys.modules and names.ENV_GRPC_FORK_HANDLERS not in os.environ:
    logging.getLogger("keepstep").warning(
        "gRPC was imported before keepstep, and a fork may hang; start the program with %s=0",
        names.ENV_GRPC_FORK_HANDLERS,
    )
os.environ.setdefault(names.ENV_GRPC_FORK_HANDLERS, "0")

import grpc

from keepstep.checkpoints.records import Kind
from keepstep.errors import AgentError, ErrorKind
from keepstep.ranks.rank_store import Ranks
from keepstep_api.names import socket_address
from keepstep_api.v1 import agent_pb2, agent_pb2_grpc

CALL_SECONDS: Final = 1.0
ANNOUNCE_SECONDS: Final = 5.0
BACK_OFF_SECONDS: Final = 30.0
"""After a time-out, calls that are not urgent are skipped for so long, so that not every save waits for a deadline."""
_ANSWER_SECONDS: Final = 30.0
"""For an answer after the time that the agent was told to wait: it may be busy with the checkpoint itself."""

_OPTIONS: Final = (("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1))


class Channel:
    """Calls to one agent. A method raises only AgentError, and takes no longer than its deadline."""

    def __init__(self, socket: Path, ranks: Ranks) -> None:
        self._socket = socket
        self._ranks = ranks
        self._process_id = os.getpid()
        self._silent_until = 0.0

    def register(
        self,
        *,
        holds_liveness_lock: bool,
        client: str,
        recovery_point_seconds: float,
        max_overhead: float,
        unprotected_directory: str,
    ) -> agent_pb2.RegisterResponse:
        request = agent_pb2.RegisterRequest(
            local_rank=self._ranks.local_rank,
            rank=self._ranks.rank,
            world_size=self._ranks.world_size,
            pid=os.getpid(),
            holds_liveness_lock=holds_liveness_lock,
            client=client,
            api_version=names.API_VERSION,
            recovery_point_seconds=recovery_point_seconds,
            max_overhead=max_overhead,
            unprotected_directory=unprotected_directory,
        )
        response: agent_pb2.RegisterResponse = self._call("Register", request)
        return response

    def begin_save(self, *, step: int, kind: Kind, save: str) -> agent_pb2.BeginSaveResponse:
        request = agent_pb2.BeginSaveRequest(step=step, kind=f"KIND_{kind.name}", save=save)
        response: agent_pb2.BeginSaveResponse = self._call("BeginSave", request)
        return response

    def announce(
        self,
        *,
        path: Path,
        step: int,
        kind: Kind,
        save: str,
        ranks: Ranks,
        stall_seconds: float,
        units: Mapping[str, float],
        urgent: bool,
        files: Sequence[str] = (),
        others: Sequence[str] = (),
        output: str = "",
    ) -> None:
        """Announce a checkpoint.

        `ranks`: this rank among those that write it. `files`: those of the save, relative to `path`, the same on all
        ranks of the pod; empty: everything in it. `others`: files of the program's own in it, which it may write to
        again; only with `files`, and at most `names.MOST_OTHERS`. `stall_seconds`: how long training stood still for
        it; 0: not known. `units`: what the program counts, done until then. `urgent`: call even during the back-off.
        """
        request = agent_pb2.AnnounceCheckpointRequest(
            path=str(path),
            step=step,
            name=path.name,
            kind=f"KIND_{kind.name}",
            save=save,
            rank=ranks.rank,
            world_size=ranks.world_size,
            local_world_size=ranks.local_world_size,
            stall_seconds=stall_seconds,
            units=[agent_pb2.Unit(name=name, done=done) for name, done in units.items()],
            files=files,
            others=others,
            output=output,
        )
        self._call("AnnounceCheckpoint", request, deadline_seconds=ANNOUNCE_SECONDS, urgent=urgent)

    def abort_save(self, save: str) -> None:
        self._call("AbortSave", agent_pb2.AbortSaveRequest(save=save))

    def notify_termination(self, source: str) -> None:
        """Tell the agent that the pod is ending. The agent applies its own configured grace period."""
        self._call("NotifyTermination", agent_pb2.NotifyTerminationRequest(grace_seconds=0, source=source))

    def status(self) -> agent_pb2.Status:
        status: agent_pb2.Status = self._call("GetStatus", agent_pb2.GetStatusRequest())
        return status

    def list_restorable(
        self, output_key: str | None, name: str, wait_seconds: float
    ) -> agent_pb2.ListRestorableResponse:
        request = agent_pb2.ListRestorableRequest(wait_ms=round(1000 * wait_seconds), output_key=output_key, name=name)
        deadline_seconds = wait_seconds + _ANSWER_SECONDS
        response: agent_pb2.ListRestorableResponse = self._call(
            "ListRestorable", request, deadline_seconds=deadline_seconds, urgent=True
        )
        return response

    def fetch(
        self, save: str, ranges: Sequence[tuple[str, int, int]] | None, wait_seconds: float
    ) -> agent_pb2.FetchResponse:
        """Ask for ranges (path, offset and length in bytes) of a committed checkpoint, or for all of it if None.

        Without ranges only ask what it consists of.
        """
        request = agent_pb2.FetchRequest(
            save=save,
            whole=ranges is None,
            ranges=[
                agent_pb2.FileRange(path=path, offset_bytes=offset_bytes, length_bytes=length_bytes)
                for path, offset_bytes, length_bytes in ranges or ()
            ],
            wait_ms=round(1000 * wait_seconds),
        )
        deadline_seconds = wait_seconds + _ANSWER_SECONDS
        response: agent_pb2.FetchResponse = self._call("Fetch", request, deadline_seconds=deadline_seconds, urgent=True)
        return response

    def _call(self, method: str, request: Any, *, deadline_seconds: float = CALL_SECONDS, urgent: bool = False) -> Any:
        if os.getpid() != self._process_id:
            raise AgentError(ErrorKind.AGENT_UNREACHABLE, "a forked process does not call the agent")
        if time.monotonic() < self._silent_until and not urgent:
            raise AgentError(
                ErrorKind.AGENT_SILENT, f"{method} not called: the agent does not answer", hint="see the agent's log"
            )
        try:
            self._socket.stat()
        except OSError as error:
            raise AgentError(
                ErrorKind.AGENT_UNREACHABLE, f"no socket at {self._socket}: {error.strerror}", hint="start the agent"
            ) from error
        try:
            with grpc.insecure_channel(socket_address(self._socket), options=_OPTIONS) as channel:
                stub = agent_pb2_grpc.AgentStub(channel)  # type: ignore[no-untyped-call]
                response = getattr(stub, method)(request, timeout=deadline_seconds)
        except grpc.RpcError as error:
            raise self._classified(method, error, deadline_seconds) from error
        self._silent_until = 0.0
        return response

    def _classified(self, method: str, error: grpc.RpcError, deadline_seconds: float) -> AgentError:
        code, details = error.code(), error.details()
        is_answer = any(one.key == names.STATUS_DETAILS for one in error.trailing_metadata() or ())
        match code:
            case grpc.StatusCode.DEADLINE_EXCEEDED:
                self._silent_until = time.monotonic() + BACK_OFF_SECONDS
                return AgentError(
                    ErrorKind.AGENT_SILENT, f"{method}: no answer in {deadline_seconds:g} s", hint="see the agent's log"
                )
            case grpc.StatusCode.UNAVAILABLE if is_answer:
                # The agent said so itself. Its own hint is in the details.
                return AgentError(ErrorKind.AGENT_BUSY, f"{method}: {details}", hint="the agent runs; its log has more")
            case grpc.StatusCode.UNAVAILABLE:
                return AgentError(
                    ErrorKind.AGENT_UNREACHABLE, f"{method}: {details}", hint="check whether the agent runs"
                )
            case grpc.StatusCode.DATA_LOSS:
                return AgentError(ErrorKind.CHECKPOINT_DAMAGED, str(details))
            case grpc.StatusCode.NOT_FOUND if method == "Fetch":
                # It was deleted since it was listed.
                return AgentError(ErrorKind.CHECKPOINT_DAMAGED, str(details))
            case _:
                return AgentError(ErrorKind.AGENT_REFUSED, f"{method}: {code.name}: {details}")

"""Every error has one gRPC status, and every reason of the wire API one kind of error that gives it."""

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from structlog.testing import capture_logs
from tests.harness.bounds import HANG_SECONDS

from keepstep_agent.core.errors import ErrorKind, KeepstepError
from keepstep_agent.runtime.api.errors import STATUS, ErrorsAnswered, status_of
from keepstep_api.names import ERROR_DOMAIN
from keepstep_api.v1 import agent_pb2, agent_pb2_grpc

CALLERS = {
    ErrorKind.PATH_OUTSIDE_VOLUME: ("INVALID_ARGUMENT", "PATH_OUTSIDE_VOLUME"),
    ErrorKind.FILE_MISSING: ("NOT_FOUND", "PATH_MISSING"),
    ErrorKind.CHECKPOINT_EMPTY: ("INVALID_ARGUMENT", "CHECKPOINT_EMPTY"),
    ErrorKind.BAD_NAME: ("INVALID_ARGUMENT", "BAD_NAME"),
    ErrorKind.CONTRADICTION: ("FAILED_PRECONDITION", "CONTRADICTION"),
    ErrorKind.BAD_REQUEST: ("INVALID_ARGUMENT", "BAD_REQUEST"),
    ErrorKind.TOO_MANY_CALLS: ("UNAVAILABLE", "TOO_MANY_CALLS"),
    ErrorKind.UNKNOWN_SAVE: ("NOT_FOUND", "UNKNOWN_SAVE"),
    ErrorKind.VOLUME_UNUSABLE: ("UNAVAILABLE", "VOLUME_UNUSABLE"),
    ErrorKind.DISK_FULL: ("RESOURCE_EXHAUSTED", "VOLUME_UNUSABLE"),
    ErrorKind.CHECKPOINT_FAILED: ("ABORTED", "CHECKPOINT_FAILED"),
    ErrorKind.CHECKPOINT_CORRUPT: ("DATA_LOSS", "CHECKPOINT_DAMAGED"),
    ErrorKind.SHUTTING_DOWN: ("UNAVAILABLE", "SHUTTING_DOWN"),
}
OTHERS = ("ABORTED", "CHECKPOINT_FAILED")


@pytest.mark.parametrize("kind", ErrorKind)
def test_every_kind_of_error_is_one_status_with_reason_and_hint(kind: ErrorKind) -> None:
    code, reason = CALLERS.get(kind, OTHERS)
    status = status_of(KeepstepError(kind, "it went wrong", hint="do this"))
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert status.code == grpc.StatusCode[code].value[0]
    assert (info.reason, info.domain) == (reason, ERROR_DOMAIN)
    assert dict(info.metadata) == {"hint": "do this", "kind": kind.value}
    assert status.message == "it went wrong (do this)"


def test_every_reason_of_the_wire_api_is_used() -> None:
    used = {reason for _, reason in STATUS.values()} | {agent_pb2.ERROR_REASON_CHECKPOINT_FAILED}
    assert used == set(agent_pb2.ErrorReason.values()) - {agent_pb2.ERROR_REASON_UNSPECIFIED}


def test_an_error_without_a_hint_says_only_what_happened() -> None:
    assert status_of(KeepstepError(ErrorKind.BAD_REQUEST, "it went wrong")).message == "it went wrong"


def test_our_own_bug_is_internal_and_says_what_to_do() -> None:
    status = status_of(ZeroDivisionError("division by zero"))
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert status.code == grpc.StatusCode.INTERNAL.value[0]
    assert (info.reason, info.domain) == ("UNSPECIFIED", ERROR_DOMAIN)
    assert "report" in info.metadata["hint"]


class _Service(agent_pb2_grpc.AgentServicer):
    """Every method raises what the test wants."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    async def RequestSave(self, request: object, context: object) -> agent_pb2.RequestSaveResponse:  # noqa: N802
        raise self._error

    async def WatchStatus(self, request: object, context: object) -> AsyncIterator[agent_pb2.Status]:  # noqa: N802
        yield agent_pb2.Status(agent_version="first")
        raise self._error


@pytest.mark.parametrize(
    ("error", "code", "kind"),
    [
        (KeepstepError(ErrorKind.VOLUME_UNUSABLE, "no volume", hint="mount it"), "UNAVAILABLE", "volume-unusable"),
        (OSError("no such thing"), "INTERNAL", "internal"),
        (ValueError("embedded null byte"), "INTERNAL", "internal"),
    ],
)
async def test_whatever_a_method_raises_is_answered_with_a_status(
    tmp_path: Path, error: Exception, code: str, kind: str
) -> None:
    server = grpc.aio.server(interceptors=[ErrorsAnswered()])
    agent_pb2_grpc.add_AgentServicer_to_server(_Service(error), server)
    server.add_insecure_port(f"unix:{tmp_path}/socket")
    await server.start()
    async with grpc.aio.insecure_channel(f"unix:{tmp_path}/socket") as channel:
        stub = agent_pb2_grpc.AgentStub(channel)
        with capture_logs() as logs:
            with pytest.raises(grpc.aio.AioRpcError) as one:
                await stub.RequestSave(agent_pb2.RequestSaveRequest(), timeout=HANG_SECONDS)
            stream = stub.WatchStatus(agent_pb2.WatchStatusRequest(), timeout=HANG_SECONDS)
            assert (await stream.read()).agent_version == "first"
            with pytest.raises(grpc.aio.AioRpcError) as several:
                await stream.read()
    await server.stop(None)
    for caught in (one.value, several.value):
        status = status_pb2.Status.FromString(dict(caught.trailing_metadata())["grpc-status-details-bin"])
        info = error_details_pb2.ErrorInfo()
        assert status.details[0].Unpack(info)
        assert (caught.code().name, info.metadata["kind"]) == (code, kind)
    assert len([line for line in logs if line["event"] == "api.failed"]) == (2 if code == "INTERNAL" else 0)

"""A trainer that opens calls and connections without end, against a real agent: it stays below its memory limit, and
goes on to store what is announced."""

import contextlib
import resource
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from tests.harness.agent_process import AgentProcess, wait_until, write_checkpoint
from tests.harness.bounds import HANG_SECONDS

from keepstep_agent.core.injection.spec import InjectionDefaults

_LIMIT_BYTES = int(InjectionDefaults(image="").memory.removesuffix("Mi")) * 1024**2
_ROUNDS = 10
_CONNECTIONS = 30
_STREAMS = 50
_DESCRIPTORS = 8_000
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_HEADERS, _SETTINGS, _DATA = 1, 4, 0
_END_STREAM, _END_HEADERS = 1, 4
_EMPTY_MESSAGE = b"\0" * 5


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def call(stream: int, method: str, *, has_request: bool) -> bytes:
    """The frames of one call, written by hand: no library opens calls as cheaply as an attacker does."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": f"/keepstep.v1.Agent/{method}",
        ":authority": "x",
        "content-type": "application/grpc",
        "te": "trailers",
    }
    block = b"".join(
        b"\x10%c%b%c%b" % (len(name), name.encode(), len(text), text.encode()) for name, text in fields.items()
    )
    head = frame(_HEADERS, _END_HEADERS, stream, block)
    return head + (frame(_DATA, _END_STREAM, stream, _EMPTY_MESSAGE) if has_request else b"")


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[AgentProcess]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, _DESCRIPTORS)), hard))
    with AgentProcess(tmp_path / "volume", f"file://{tmp_path}/destination", warm=False) as agent:
        yield agent
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def sockets() -> Iterator[contextlib.ExitStack]:
    """Closes the attackers' connections at the end."""
    with contextlib.ExitStack() as stack:
        yield stack


def connect(agent: AgentProcess, sockets: contextlib.ExitStack, sent: bytes) -> socket.socket:
    connection = sockets.enter_context(socket.socket(socket.AF_UNIX))
    connection.settimeout(HANG_SECONDS)
    # A connection beyond the limit is closed at once.
    with contextlib.suppress(ConnectionError):
        connection.connect(str(agent.socket))
        connection.sendall(_PREFACE + frame(_SETTINGS, 0, 0, b"") + sent)
    return connection


def wait_until_stored(agent: AgentProcess, step: int) -> None:
    """Announce a checkpoint, again if gRPC found no room for the connection or the call."""
    path = write_checkpoint(agent.checkpoints / f"checkpoint-{step}", {"model.bin": 1000})

    def is_stored() -> bool:
        try:
            agent.wait_committed(agent.announce(path, step, save=f"save-{step}").save)
        except grpc.RpcError as error:
            if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
                return False
            raise
        return True

    wait_until(is_stored, HANG_SECONDS, "it is announced and stored")


@pytest.mark.parametrize(
    ("method", "has_request"),
    [
        pytest.param("WatchStatus", True, id="streams"),
        pytest.param("WatchStatus", False, id="streams without a request"),
        pytest.param("Fetch", False, id="calls without a request"),
        pytest.param("Nothing", True, id="calls of no method"),
    ],
)
def test_ten_rounds_of_open_calls_stay_below_the_memory_limit_and_a_save_commits(
    agent: AgentProcess, sockets: contextlib.ExitStack, method: str, has_request: bool
) -> None:
    calls = b"".join(call(2 * number + 1, method, has_request=has_request) for number in range(_STREAMS))
    for number in range(_ROUNDS):
        for _ in range(_CONNECTIONS):
            connect(agent, sockets, calls)
        wait_until_stored(agent, number)
    assert agent.memory_bytes("VmHWM") < _LIMIT_BYTES


def test_idle_connections_make_room_and_a_save_is_announced_again(
    agent: AgentProcess, sockets: contextlib.ExitStack
) -> None:
    for _ in range(_ROUNDS):
        for _ in range(500):
            connect(agent, sockets, b"")
    wait_until_stored(agent, 1)
    assert agent.memory_bytes("VmHWM") < _LIMIT_BYTES // 2

"""Whether an agent serves on a socket: asked every moment while one starts."""

import socket
from pathlib import Path

import grpc
import pytest
from tests.harness.agent_process import AgentProcess
from tests.harness.bounds import HANG_SECONDS

from keepstep_agent.cli.agent_call import agent_answers, agent_stub
from keepstep_agent.core.errors import KeepstepError
from keepstep_api.names import socket_address
from keepstep_api.v1 import agent_pb2, agent_pb2_grpc


@pytest.fixture
def channels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every gRPC channel that was opened."""
    opened: list[str] = []
    open_channel = grpc.insecure_channel

    def counted(target: str) -> grpc.Channel:
        opened.append(target)
        return open_channel(target)

    monkeypatch.setattr(grpc, "insecure_channel", counted)
    return opened


@pytest.mark.parametrize("left", ["nothing", "a file", "a socket that nobody listens on"])
def test_no_channel_is_opened_while_no_agent_listens(tmp_path: Path, left: str, channels: list[str]) -> None:
    path = tmp_path / "agent.sock"
    if left == "a file":
        path.write_text("")
    elif left != "nothing":
        with socket.socket(socket.AF_UNIX) as stale:
            stale.bind(str(path))
    for _ in range(100):
        assert not agent_answers(str(path))
    assert channels == []


def test_an_agent_that_serves_answers_until_it_is_gone(tmp_path: Path, channels: list[str]) -> None:
    with AgentProcess(tmp_path / "volume", f"file://{tmp_path / 'destination'}") as agent:
        path = str(agent.socket)
        channels.clear()
        assert agent_answers(path)
        assert len(channels) == 1
    assert not agent_answers(path)


def test_an_agent_that_has_too_many_calls_open_refuses_and_is_there(tmp_path: Path) -> None:
    # Not the connection of the call that is refused: more calls than a connection may have wait in their client.
    options = [("grpc.use_local_subchannel_pool", 1)]
    with (
        AgentProcess(tmp_path / "volume", f"file://{tmp_path / 'destination'}") as agent,
        grpc.insecure_channel(socket_address(str(agent.socket)), options) as channel,
    ):
        watch = agent_pb2_grpc.AgentStub(channel).WatchStatus
        watched = [watch(agent_pb2.WatchStatusRequest(), timeout=HANG_SECONDS) for _ in range(64)]
        assert all(next(stream).agent_version for stream in watched)
        with (
            pytest.raises(KeepstepError, match="the agent refused: WatchStatus: 64 calls are open"),
            agent_stub(str(agent.socket)) as stub,
        ):
            next(stub.WatchStatus(agent_pb2.WatchStatusRequest(), timeout=HANG_SECONDS))

"""Whether an agent serves on a socket: asked every moment while one starts."""

import socket
from pathlib import Path

import grpc
import pytest
from tests.harness.agent_process import AgentProcess

from keepstep_agent.cli.agent_call import agent_answers


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

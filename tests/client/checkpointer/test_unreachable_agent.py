"""An agent that is absent, hangs or dies costs a bounded wait, and is told later what it missed."""

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from tests.client import agent_server
from tests.client.agent_server import AgentServer, serving
from tests.client.checkpointer.saved_steps import Make, local, save, warnings
from tests.client.conftest import set_deadlines
from tests.harness.bounds import HANG_SECONDS

import keepstep.agent_client.client
from keepstep.agent_client import channel
from keepstep.agent_client.channel import ANNOUNCE_SECONDS, CALL_SECONDS
from keepstep.agent_client.client import RETRY_SECONDS
from keepstep.checkpoints.records import Kind, read_records
from keepstep.errors import AgentError
from keepstep.ranks.rank_store import Ranks
from keepstep_agent.runtime.api.call_limits import _MOST_OPEN, CallsLimited
from keepstep_agent.runtime.api.errors import ErrorsAnswered
from keepstep_api import names
from keepstep_api.v1 import agent_pb2, agent_pb2_grpc


@pytest.fixture
def without_answer(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, float]]:
    """The calls that got no answer or an error, each with the seconds that it would have waited for one.

    Their sum is what an agent costs; a clock would count what the disk and the machine cost, too.
    """
    calls: list[tuple[str, float]] = []
    classified = channel.Channel._classified

    def note(self: channel.Channel, method: str, error: grpc.RpcError, deadline_seconds: float) -> AgentError:
        calls.append((method, deadline_seconds))
        return classified(self, method, error, deadline_seconds)

    monkeypatch.setattr(channel.Channel, "_classified", note)
    # However long the disk takes, no second call is due.
    monkeypatch.setattr(channel, "BACK_OFF_SECONDS", 3600.0)
    return calls


@pytest.fixture
def deadlines_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    set_deadlines(monkeypatch, CALL_SECONDS, ANNOUNCE_SECONDS)


def test_an_absent_agent_is_said_once_and_costs_no_time(
    make_checkpointer: Make,
    volume: Path,
    caplog: pytest.LogCaptureFixture,
    without_answer: list[tuple[str, float]],
) -> None:
    checkpointer = make_checkpointer()
    for step in range(1, 6):
        assert checkpointer.should_save(step, every=1)
        save(checkpointer, step)
    assert without_answer == []
    assert local(volume) == ["checkpoint-4", "checkpoint-5"]
    assert len(warnings(caplog)) == 1
    assert "agent unreachable" in warnings(caplog)[0]


class _BusyAgent(agent_pb2_grpc.AgentServicer):
    """An agent that answers its first caller when `may_answer` is set."""

    def __init__(self) -> None:
        self.is_called, self.may_answer = asyncio.Event(), asyncio.Event()

    async def Register(self, request: object, context: object) -> agent_pb2.RegisterResponse:  # noqa: N802
        self.is_called.set()
        await self.may_answer.wait()
        return agent_pb2.RegisterResponse(api_version=names.API_VERSION)


async def test_an_agent_that_has_too_many_calls_open_is_said_to_refuse_and_not_to_be_away(
    volume: Path, caplog: pytest.LogCaptureFixture
) -> None:
    socket = volume / names.STATE_DIRECTORY / names.SOCKET
    socket.parent.mkdir(parents=True)
    servicer = _BusyAgent()
    server = grpc.aio.server(interceptors=[CallsLimited(dict.fromkeys(_MOST_OPEN, 1)), ErrorsAnswered()])
    agent_pb2_grpc.add_AgentServicer_to_server(servicer, server)
    server.add_insecure_port(f"unix:{socket}")
    await server.start()

    def open_client() -> keepstep.agent_client.client.Agent:
        return keepstep.agent_client.client.Agent(socket, ranks=Ranks(rank=0), holds_liveness_lock=False)

    try:
        first = asyncio.ensure_future(asyncio.to_thread(open_client))
        async with asyncio.timeout(HANG_SECONDS):
            await servicer.is_called.wait()
        second = await asyncio.to_thread(open_client)
        servicer.may_answer.set()
        assert not (await first).unreachable
        assert second.unreachable
        second._look_at = 0.0
        assert await asyncio.to_thread(second.is_back)
    finally:
        await server.stop(None)
    (line,) = warnings(caplog)
    assert "agent unreachable" not in line
    assert "the agent refuses calls for now" in line
    assert "1 calls are open, and more may not be (end calls that you do not need, or call again later)" in line


def test_an_agent_that_comes_later_gets_to_know_the_process_and_the_last_checkpoint(
    make_checkpointer: Make, volume: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    checkpointer = make_checkpointer()
    save(checkpointer, 1)
    with serving(volume / names.STATE_DIRECTORY / names.SOCKET, AgentServer()) as agent:
        save(checkpointer, 2)
        assert [method for method, _ in agent.calls] == ["Register", "BeginSave", *["AnnounceCheckpoint"] * 2]
        assert [request.step for request in agent.requests("AnnounceCheckpoint")] == [1, 2]
    assert "agent reachable again" in caplog.messages


def test_a_rank_that_only_announces_makes_itself_known_to_an_agent_that_came_back(volume: Path) -> None:
    socket, ranks = volume / names.STATE_DIRECTORY / names.SOCKET, Ranks(rank=1, world_size=2, pod=(0, 1))
    client = keepstep.agent_client.client.Agent(socket, ranks=ranks, holds_liveness_lock=True)
    with serving(socket, AgentServer()) as agent:
        for step in (1, 2):
            assert client.announce(
                path=volume / "a",
                step=step,
                kind=Kind.PERIODIC,
                save=str(step),
                ranks=ranks,
                stall_seconds=0.0,
                units={},
                urgent=False,
            )
        assert sorted(method for method, _ in agent.calls) == ["AnnounceCheckpoint"] * 2 + ["Register"]
        assert [(one.rank, one.world_size) for one in agent.requests("Register")] == [(1, 2)]


def test_a_checkpoint_that_was_not_announced_is_announced_at_a_step_when_the_agent_is_back(
    make_checkpointer: Make, volume: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointer = make_checkpointer()
    monkeypatch.setattr(keepstep.agent_client.client, "RETRY_SECONDS", 0.0)
    save(checkpointer, 1)
    save(checkpointer, 2)
    with serving(volume / names.STATE_DIRECTORY / names.SOCKET, AgentServer()) as agent:
        assert not any(checkpointer.should_save(step, every=100) for step in range(3, 9))
        assert [method for method, _ in agent.calls] == ["Register", "AnnounceCheckpoint"]
        (announce,) = agent.requests("AnnounceCheckpoint")
        checkpointer.finish()
        assert len(agent.calls) == 2
    assert announce.step == 2
    assert [record.announced for record in read_records(volume / ".keepstep/records")] == [True, False]


def test_steps_wait_for_an_agent_that_hangs_once_in_a_back_off_period(
    agent: AgentServer,
    make_checkpointer: Make,
    monkeypatch: pytest.MonkeyPatch,
    without_answer: list[tuple[str, float]],
) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(channel, "BACK_OFF_SECONDS", RETRY_SECONDS)
    checkpointer = make_checkpointer()
    agent.answering.clear()
    set_deadlines(monkeypatch, CALL_SECONDS, ANNOUNCE_SECONDS)
    save(checkpointer, 1)
    without_answer.clear()
    for period in range(1, 3):
        now += RETRY_SECONDS
        assert not any(checkpointer.should_save(100 * period + step, every=10_000) for step in range(50))
        assert without_answer == [("Register", CALL_SECONDS)] * period
    set_deadlines(monkeypatch, HANG_SECONDS, HANG_SECONDS)
    agent.answering.set()
    now += RETRY_SECONDS
    assert not checkpointer.should_save(9000, every=10_000)
    assert [method for method, _ in agent.calls[-2:]] == ["Register", "AnnounceCheckpoint"]


def test_what_the_agent_refused_is_not_announced_at_steps_or_beside_later_saves(
    agent: AgentServer, make_checkpointer: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keepstep.agent_client.client, "RETRY_SECONDS", 0.0)
    checkpointer = make_checkpointer()
    agent.refuse_with = grpc.StatusCode.INVALID_ARGUMENT
    save(checkpointer, 1)
    agent.refuse_with = None
    assert not checkpointer.should_save(2, every=100)
    save(checkpointer, 3)
    assert [request.step for request in agent.requests("AnnounceCheckpoint")] == [1, 3]


def test_a_just_in_time_save_waits_for_nothing_older(make_checkpointer: Make, volume: Path) -> None:
    checkpointer = make_checkpointer()
    save(checkpointer, 1)
    with serving(volume / names.STATE_DIRECTORY / names.SOCKET, AgentServer()) as agent:
        os.kill(os.getpid(), signal.SIGTERM)
        assert checkpointer.should_save(2)
        save(checkpointer, 2)
        assert [request.step for request in agent.requests("AnnounceCheckpoint")] == [2]


def test_a_checkpoint_that_was_not_announced_is_announced_at_the_end(make_checkpointer: Make, volume: Path) -> None:
    checkpointer = make_checkpointer()
    save(checkpointer, 1, "final")
    with serving(volume / names.STATE_DIRECTORY / names.SOCKET, AgentServer()) as agent:
        checkpointer.finish()
        (announce,) = agent.requests("AnnounceCheckpoint")
    assert announce.step == 1


def test_an_agent_that_hangs_is_paid_for_once(
    agent: AgentServer,
    make_checkpointer: Make,
    volume: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    without_answer: list[tuple[str, float]],
) -> None:
    checkpointer = make_checkpointer()
    agent.answering.clear()
    set_deadlines(monkeypatch, CALL_SECONDS, ANNOUNCE_SECONDS)
    for step in range(1, 6):
        assert checkpointer.should_save(step, every=1)
        save(checkpointer, step)
    assert without_answer == [("BeginSave", CALL_SECONDS)]
    assert len(warnings(caplog)) == 1
    assert local(volume) == ["checkpoint-4", "checkpoint-5"]


def test_what_an_agent_took_and_answered_too_late_is_not_said_to_stay_on_the_disk(
    agent: AgentServer,
    make_checkpointer: Make,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    without_answer: list[tuple[str, float]],
) -> None:
    """As on a machine whose CPU is wanted by others: nobody here knows what became of the call."""
    checkpointer = make_checkpointer()
    agent.answering.clear()
    set_deadlines(monkeypatch, CALL_SECONDS, ANNOUNCE_SECONDS)
    save(checkpointer, 1, "final")
    assert [method for method, _ in without_answer] == ["BeginSave", "AnnounceCheckpoint"]
    assert [request.step for request in agent.requests("AnnounceCheckpoint")] == [1]
    (warning,) = warnings(caplog)
    assert warning.startswith(
        "agent unreachable, checkpoints are announced again when it answers: error=BeginSave: no answer in 1 s"
    )


def test_a_just_in_time_announcement_is_tried_on_an_agent_that_hung(
    agent: AgentServer,
    make_checkpointer: Make,
    monkeypatch: pytest.MonkeyPatch,
    without_answer: list[tuple[str, float]],
) -> None:
    checkpointer = make_checkpointer()
    agent.answering.clear()
    set_deadlines(monkeypatch, CALL_SECONDS, HANG_SECONDS)
    assert checkpointer.should_save(1, every=1)
    save(checkpointer, 1)
    assert without_answer == [("BeginSave", CALL_SECONDS)]
    set_deadlines(monkeypatch, HANG_SECONDS, HANG_SECONDS)
    agent.answering.set()
    checkpointer._session.context().gate.notice()
    assert checkpointer.should_save(2)
    save(checkpointer, 2)
    (announce,) = agent.requests("AnnounceCheckpoint")
    assert (announce.step, announce.kind) == (2, agent_pb2.KIND_JUST_IN_TIME)
    assert checkpointer.stopping


@pytest.fixture
def deaf_socket(volume: Path) -> Iterator[Path]:
    """A socket that accepts connections and says nothing."""
    path = volume / names.STATE_DIRECTORY / names.SOCKET
    path.parent.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(8)
        yield path


@pytest.mark.usefixtures("deaf_socket", "deadlines_as_they_are")
def test_a_socket_that_never_speaks_delays_by_one_deadline(
    make_checkpointer: Make, without_answer: list[tuple[str, float]]
) -> None:
    checkpointer = make_checkpointer()
    save(checkpointer, 1)
    save(checkpointer, 2)
    assert without_answer == [("Register", CALL_SECONDS)]


@pytest.mark.usefixtures("deaf_socket", "deadlines_as_they_are")
def test_the_whole_just_in_time_save_beside_a_deaf_agent_is_bounded(
    make_checkpointer: Make, without_answer: list[tuple[str, float]]
) -> None:
    checkpointer = make_checkpointer()
    os.kill(os.getpid(), signal.SIGTERM)
    assert checkpointer.should_save(1)
    save(checkpointer, 1)
    with pytest.raises(SystemExit) as left:
        checkpointer.finish()
    assert left.value.code == 143
    assert without_answer == [("Register", CALL_SECONDS), ("AnnounceCheckpoint", ANNOUNCE_SECONDS)]


@pytest.mark.parametrize("method", ["Register", "BeginSave", "AnnounceCheckpoint"])
def test_an_agent_that_dies_in_a_call_costs_the_announcement_alone(
    make_checkpointer: Make, volume: Path, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    path = volume / names.STATE_DIRECTORY / names.SOCKET
    process = subprocess.Popen(
        [sys.executable, agent_server.__file__, str(path), method], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "serving\n"
        checkpointer = make_checkpointer()
        assert checkpointer.should_save(1, every=1)
        save(checkpointer, 1)
        assert process.wait(HANG_SECONDS) == 1
    finally:
        process.kill()
        process.communicate(timeout=HANG_SECONDS)
    assert local(volume) == ["checkpoint-1"]
    assert len(warnings(caplog)) == 1

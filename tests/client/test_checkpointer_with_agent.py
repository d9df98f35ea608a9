"""A Checkpointer beside a real gRPC server on a unix socket that answers, refuses, hangs or dies."""

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from tests.client import agent_server
from tests.client.agent_server import AgentServer, serving
from tests.client.conftest import WAIT_SECONDS, set_deadlines

import mooring.agent_client.client
from mooring import Checkpointer
from mooring.agent_client import channel
from mooring.agent_client.channel import ANNOUNCE_SECONDS, CALL_SECONDS
from mooring.agent_client.client import RETRY_SECONDS
from mooring.checkpoints.records import Kind, read_records
from mooring.errors import AgentError
from mooring.ranks.rank_store import Ranks
from mooring_api import names, signal_file
from mooring_api.v1 import agent_pb2

Make = Callable[..., Checkpointer]


def save(checkpointer: Checkpointer, step: int, kind: str | None = None) -> None:
    with checkpointer.save(step, kind) as path:
        (path / "state").write_text(f"state of {step}")


def local(volume: Path) -> list[str]:
    return sorted(path.name for path in (volume / "checkpoints").iterdir())


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelno >= logging.WARNING]


def request_save(volume: Path, number: int, *, terminating: bool, seconds_left: float = 30.0) -> None:
    path = volume / names.STATE_DIRECTORY / names.SIGNAL_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    deadline_unix = time.time() + seconds_left if terminating else 0.0
    content = signal_file.encode(
        signal_file.SaveSignal(number=number, deadline_unix=deadline_unix, terminating=terminating)
    )
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o660)
    os.pwrite(descriptor, content, 0)
    os.close(descriptor)


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


def test_the_agent_learns_of_the_process_and_of_every_checkpoint(
    agent: AgentServer, make_checkpointer: Make, volume: Path
) -> None:
    checkpointer = make_checkpointer()
    assert checkpointer.should_save(100)
    save(checkpointer, 100)
    (register,) = agent.requests("Register")
    assert register.holds_liveness_lock
    assert register.pid == os.getpid()
    assert register.client.startswith("mooring-python/")
    (begin,) = agent.requests("BeginSave")
    assert begin.step == 100
    (announce,) = agent.requests("AnnounceCheckpoint")
    assert announce.path == str(volume / "checkpoints" / "checkpoint-100")
    assert (announce.step, announce.name, announce.world_size) == (100, "checkpoint-100", 1)
    assert announce.kind == agent_pb2.KIND_PERIODIC
    assert announce.save == begin.save != ""


@pytest.mark.parametrize(("api_version", "older"), [(0, "agent"), (names.API_VERSION + 1, "client")])
def test_an_agent_of_another_version_is_said_once_and_serves(
    agent: AgentServer, make_checkpointer: Make, caplog: pytest.LogCaptureFixture, api_version: int, older: str
) -> None:
    agent.api_version = api_version
    checkpointer = make_checkpointer()
    for step in (1, 2):
        save(checkpointer, step)
    (said,) = warnings(caplog)
    assert said.startswith(f"the {older} is older: ")
    assert len(agent.requests("AnnounceCheckpoint")) == 2


def test_steps_without_a_save_never_call_the_agent(agent: AgentServer, make_checkpointer: Make) -> None:
    checkpointer = make_checkpointer()
    assert not any(checkpointer.should_save(step) for step in range(1, 100))
    assert [method for method, _ in agent.calls] == ["Register"]


def test_one_local_checkpoint_stays_once_the_newer_one_is_announced(
    agent: AgentServer, make_checkpointer: Make, volume: Path
) -> None:
    checkpointer = make_checkpointer()
    for step in (1, 2, 3):
        save(checkpointer, step)
    assert local(volume) == ["checkpoint-3"]


def test_the_checkpoint_resumed_from_stays_until_a_newer_one_is_complete(
    agent: AgentServer, make_checkpointer: Make, volume: Path
) -> None:
    save(make_checkpointer(), 1)
    checkpointer = make_checkpointer()
    assert checkpointer.resume() == volume / "checkpoints" / "checkpoint-1"
    with pytest.raises(RuntimeError), checkpointer.save(2):
        raise RuntimeError
    assert local(volume) == ["checkpoint-1"]
    save(checkpointer, 2)
    assert local(volume) == ["checkpoint-2"]


def test_a_save_that_is_not_admitted_is_skipped_with_a_line(
    agent: AgentServer, make_checkpointer: Make, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer = make_checkpointer()
    agent.admitted = False
    assert not checkpointer.should_save(100)
    assert warnings(caplog) == ["save not admitted: step=100 reason=no room"]
    agent.admitted = True
    assert checkpointer.should_save(200)


def test_a_save_the_user_insists_on_is_made_though_it_was_not_admitted(
    agent: AgentServer, make_checkpointer: Make, volume: Path
) -> None:
    checkpointer = make_checkpointer()
    agent.admitted = False
    save(checkpointer, 5, "final")
    (announce,) = agent.requests("AnnounceCheckpoint")
    assert announce.kind == agent_pb2.KIND_FINAL
    assert announce.save
    assert local(volume) == ["checkpoint-5"]


def test_a_save_that_failed_or_was_never_made_is_taken_back(agent: AgentServer, make_checkpointer: Make) -> None:
    checkpointer = make_checkpointer()
    with pytest.raises(RuntimeError), checkpointer.save(1):
        raise RuntimeError
    assert checkpointer.should_save(100)
    assert checkpointer.should_save(200)
    checkpointer.finish()
    begun = [request.save for request in agent.requests("BeginSave")]
    assert len(set(begun)) == 3
    assert [request.save for request in agent.requests("AbortSave")] == begun


def test_no_save_id_is_ever_used_twice_when_the_agent_comes_and_goes(make_checkpointer: Make, volume: Path) -> None:
    path = volume / names.STATE_DIRECTORY / names.SOCKET
    checkpointer = make_checkpointer()
    seen = []
    save(checkpointer, 1)
    for step in (2, 4):
        with serving(path, AgentServer()) as agent:
            save(checkpointer, step)
            agent.refuse_with = grpc.StatusCode.INTERNAL
            save(checkpointer, step + 1)
            seen += [request.save for request in agent.requests("AnnounceCheckpoint")]
    assert len(seen) == 5
    assert len(set(seen)) == 5


def test_an_agent_that_refuses_costs_a_line_and_no_training(
    agent: AgentServer, make_checkpointer: Make, volume: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer = make_checkpointer()
    agent.refuse_with = grpc.StatusCode.FAILED_PRECONDITION
    for step in (1, 2, 3):
        save(checkpointer, step)
    assert local(volume) == ["checkpoint-2", "checkpoint-3"]
    assert any("AnnounceCheckpoint: FAILED_PRECONDITION: not like this" in line for line in warnings(caplog))


def test_a_file_name_that_the_agent_refuses_costs_one_line_with_the_reason(
    agent: AgentServer, make_checkpointer: Make, volume: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer = make_checkpointer()
    assert checkpointer.should_save(1, every=1)
    # As the agent answers to such a name.
    agent.refuse_with = grpc.StatusCode.INVALID_ARGUMENT
    with checkpointer.save(1) as path:
        Path(os.fsdecode(os.fsencode(path) + b"/caf\xe9.pt")).write_text("x")
    assert warnings(caplog) == ["the agent refused: error=AnnounceCheckpoint: INVALID_ARGUMENT: not like this"]
    assert checkpointer.resume() == volume / "checkpoints" / "checkpoint-1"


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
    client = mooring.agent_client.client.Agent(socket, ranks=ranks, holds_liveness_lock=True)
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
    monkeypatch.setattr(mooring.agent_client.client, "RETRY_SECONDS", 0.0)
    save(checkpointer, 1)
    save(checkpointer, 2)
    with serving(volume / names.STATE_DIRECTORY / names.SOCKET, AgentServer()) as agent:
        assert not any(checkpointer.should_save(step, every=100) for step in range(3, 9))
        assert [method for method, _ in agent.calls] == ["Register", "AnnounceCheckpoint"]
        (announce,) = agent.requests("AnnounceCheckpoint")
        checkpointer.finish()
        assert len(agent.calls) == 2
    assert announce.step == 2
    assert [record.announced for record in read_records(volume / ".mooring/records")] == [True, False]


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
    set_deadlines(monkeypatch, WAIT_SECONDS, WAIT_SECONDS)
    agent.answering.set()
    now += RETRY_SECONDS
    assert not checkpointer.should_save(9000, every=10_000)
    assert [method for method, _ in agent.calls[-2:]] == ["Register", "AnnounceCheckpoint"]


def test_what_the_agent_refused_is_not_announced_at_steps_or_beside_later_saves(
    agent: AgentServer, make_checkpointer: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mooring.agent_client.client, "RETRY_SECONDS", 0.0)
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


def test_a_just_in_time_announcement_is_tried_on_an_agent_that_hung(
    agent: AgentServer,
    make_checkpointer: Make,
    monkeypatch: pytest.MonkeyPatch,
    without_answer: list[tuple[str, float]],
) -> None:
    checkpointer = make_checkpointer()
    agent.answering.clear()
    set_deadlines(monkeypatch, CALL_SECONDS, WAIT_SECONDS)
    assert checkpointer.should_save(1, every=1)
    save(checkpointer, 1)
    assert without_answer == [("BeginSave", CALL_SECONDS)]
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
        assert process.wait(20) == 1
    finally:
        process.kill()
        process.communicate(timeout=20)
    assert local(volume) == ["checkpoint-1"]
    assert len(warnings(caplog)) == 1


def test_an_operators_request_brings_one_save_at_the_next_step_and_training_goes_on(
    agent: AgentServer, make_checkpointer: Make, volume: Path
) -> None:
    request_save(volume, 1, terminating=False)
    checkpointer = make_checkpointer()
    assert not checkpointer.should_save(1)
    request_save(volume, 2, terminating=False)
    assert checkpointer.should_save(2)
    save(checkpointer, 2)
    assert not checkpointer.should_save(3)
    assert not checkpointer.stopping
    (announce,) = agent.requests("AnnounceCheckpoint")
    assert announce.kind == agent_pb2.KIND_PERIODIC


def test_a_terminating_ring_brings_a_just_in_time_save_and_the_exit(
    agent: AgentServer, make_checkpointer: Make, volume: Path
) -> None:
    request_save(volume, 0, terminating=False)
    checkpointer = make_checkpointer()
    request_save(volume, 1, terminating=True)
    assert checkpointer.should_save(1)
    assert not checkpointer.stopping
    save(checkpointer, 1)
    assert checkpointer.stopping
    assert not checkpointer.should_save(100)
    (announce,) = agent.requests("AnnounceCheckpoint")
    assert announce.kind == agent_pb2.KIND_JUST_IN_TIME
    assert not agent.requests("NotifyTermination")
    with pytest.raises(SystemExit) as left:
        checkpointer.finish()
    assert left.value.code == names.JUST_IN_TIME_EXIT_CODE


def test_a_notice_during_a_periodic_save_makes_it_the_just_in_time_one(
    agent: AgentServer, make_checkpointer: Make
) -> None:
    checkpointer = make_checkpointer()
    assert checkpointer.should_save(100)
    with checkpointer.save(100) as path:
        (path / "state").write_text("x")
        os.kill(os.getpid(), signal.SIGTERM)
    (announce,) = agent.requests("AnnounceCheckpoint")
    assert announce.kind == agent_pb2.KIND_JUST_IN_TIME
    assert checkpointer.stopping


def test_a_final_save_under_a_notice_is_a_finished_run(agent: AgentServer, make_checkpointer: Make) -> None:
    checkpointer = make_checkpointer()
    os.kill(os.getpid(), signal.SIGTERM)
    save(checkpointer, 9, "final")
    checkpointer.finish()
    (announce,) = agent.requests("AnnounceCheckpoint")
    assert announce.kind == agent_pb2.KIND_FINAL


def test_a_final_save_after_the_just_in_time_one_does_not_make_the_run_a_finished_one(
    agent: AgentServer, make_checkpointer: Make
) -> None:
    checkpointer = make_checkpointer()
    os.kill(os.getpid(), signal.SIGTERM)
    assert checkpointer.should_save(5)
    save(checkpointer, 5)
    assert checkpointer.stopping
    save(checkpointer, 6, "final")
    assert checkpointer.stopping
    with pytest.raises(SystemExit) as left:
        checkpointer.finish()
    assert left.value.code == names.JUST_IN_TIME_EXIT_CODE


def test_a_notice_that_an_absent_agent_missed_is_told_to_the_next_one(
    make_checkpointer: Make, volume: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = volume / names.STATE_DIRECTORY / names.SOCKET
    with serving(path, AgentServer()):
        checkpointer = make_checkpointer()
    os.kill(os.getpid(), signal.SIGTERM)
    assert checkpointer.should_save(1)
    save(checkpointer, 1)
    assert len(warnings(caplog)) == 1
    with serving(path, AgentServer()) as back, pytest.raises(SystemExit):
        checkpointer.finish()
    assert [method for method, _ in back.calls] == ["NotifyTermination", "AnnounceCheckpoint", "Register"]


def test_the_agent_is_told_once_of_our_own_sigterm(agent: AgentServer, make_checkpointer: Make) -> None:
    checkpointer = make_checkpointer()
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)
    assert checkpointer.should_save(1)
    save(checkpointer, 1)
    (notice,) = agent.requests("NotifyTermination")
    assert (notice.source, notice.grace_seconds) == ("client-sigterm", 0.0)
    assert [method for method, _ in agent.calls] == ["Register", "NotifyTermination", "BeginSave", "AnnounceCheckpoint"]


def test_started_in_a_pod_that_ends_it_leaves_before_the_first_step(
    agent: AgentServer, make_checkpointer: Make
) -> None:
    agent.terminating = True
    checkpointer = make_checkpointer()
    with pytest.raises(SystemExit) as left:
        checkpointer.resume()
    assert left.value.code == names.JUST_IN_TIME_EXIT_CODE
    assert [method for method, _ in agent.calls] == ["Register"]


def test_what_was_trained_is_saved_though_it_resumes_again_in_a_pod_that_ends(
    agent: AgentServer, make_checkpointer: Make
) -> None:
    checkpointer = make_checkpointer()
    save(checkpointer, 1)
    assert not checkpointer.should_save(2)
    os.kill(os.getpid(), signal.SIGTERM)
    assert checkpointer.resume() is not None
    assert checkpointer.should_save(2)


def test_an_agent_that_is_terminating_already_stops_the_first_step(agent: AgentServer, make_checkpointer: Make) -> None:
    agent.terminating = True
    assert make_checkpointer().should_save(1)

"""What an operator's request or a notice makes of the saves, and how the training leaves."""

import os
import signal
import time
from pathlib import Path

import pytest
from tests.client.agent_server import AgentServer, serving
from tests.client.checkpointer.saved_steps import Make, save, warnings

from keepstep_api import names, signal_file
from keepstep_api.v1 import agent_pb2


def request_save(volume: Path, number: int, *, terminating: bool, seconds_left: float = 3600.0) -> None:
    path = volume / names.STATE_DIRECTORY / names.SIGNAL_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    deadline_unix = time.time() + seconds_left if terminating else 0.0
    content = signal_file.encode(
        signal_file.SaveSignal(number=number, deadline_unix=deadline_unix, terminating=terminating)
    )
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o660)
    os.pwrite(descriptor, content, 0)
    os.close(descriptor)


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

"""What a Checkpointer tells a real gRPC server on a unix socket, and how it takes a refusal."""

import os
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.client.agent_server import AgentServer, serving
from tests.client.checkpointer.saved_steps import Make, local, save, warnings

from keepstep.agent_client.client import Agent
from keepstep.checkpoints.records import Kind
from keepstep.ranks.rank_store import Ranks
from keepstep_api import names
from keepstep_api.v1 import agent_pb2


def test_the_agent_learns_of_the_process_and_of_every_checkpoint(
    agent: AgentServer, make_checkpointer: Make, volume: Path
) -> None:
    checkpointer = make_checkpointer()
    assert checkpointer.should_save(100)
    save(checkpointer, 100)
    (register,) = agent.requests("Register")
    assert register.holds_liveness_lock
    assert register.pid == os.getpid()
    assert register.client.startswith("keepstep-python/")
    (begin,) = agent.requests("BeginSave")
    assert begin.step == 100
    (announce,) = agent.requests("AnnounceCheckpoint")
    assert announce.path == str(volume / "checkpoints" / "checkpoint-100")
    assert (announce.step, announce.name, announce.world_size) == (100, "checkpoint-100", 1)
    assert announce.kind == agent_pb2.KIND_PERIODIC
    assert announce.save == begin.save != ""


def test_the_agent_is_told_which_files_are_the_save_s_and_which_the_program_s(agent: AgentServer, volume: Path) -> None:
    ranks = Ranks(rank=0, world_size=1, pod=(0,))
    client = Agent(volume / names.STATE_DIRECTORY / names.SOCKET, ranks=ranks, holds_liveness_lock=True)
    announced: dict[str, Any] = {
        "path": volume / "out",
        "step": 1,
        "kind": Kind.PERIODIC,
        "save": "a-1",
        "ranks": ranks,
        "stall_seconds": 0.0,
        "units": {},
        "urgent": False,
    }
    assert client.announce(**announced, files=["model.bin"], others=["train.log"])
    assert client.announce(**announced)
    files = [(list(one.files), list(one.others)) for one in agent.requests("AnnounceCheckpoint")]
    assert files == [(["model.bin"], ["train.log"]), ([], [])]


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

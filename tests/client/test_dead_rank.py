"""A rank that dies: the other one does not wait for it, says which one is gone and what is lost, and ends by itself."""

import re
import signal
import time
from pathlib import Path

import pytest
from tests.client.agent_server import AgentServer, serving
from tests.client.ranks.job import job, notify
from tests.harness.agent_process import wait_until
from tests.harness.bounds import HANG_SECONDS
from tests.torch_loop.torchrun import torchrun

from keepstep_api import names
from keepstep_api.v1 import agent_pb2

PROGRAM = Path(__file__).with_name("ranks") / "trainer.py"


@pytest.mark.parametrize("environment", [{}, {"ASYNCHRONOUS": "1"}], ids=["in training", "behind it"])
@pytest.mark.parametrize("scenario", ["checkpointer_of_which_rank_1_dies", "framework_of_which_rank_1_dies"])
def test_a_rank_that_dies_in_a_save_is_not_waited_for(
    scenario: str, environment: dict[str, str], tmp_path: Path
) -> None:
    volume = tmp_path / "v"
    with job(scenario, tmp_path, [volume], local_world_size=2, KILLED="in a save", **environment) as (rank, _):
        assert rank.rest() == ["passed 1", "passed 2"]
        assert rank.exit_code() == 1
        log = rank.log_text()
    assert re.search(r"a rank is gone and not waited for: about=\S+/2/written ended=rank 1\n", log), log
    assert re.search(r"another rank failed: path=\S+/checkpoint-2\n", log), log
    assert [path.name for path in volume.glob("*/checkpoint-*")] == ["checkpoint-1"]


@pytest.mark.parametrize("scenario", ["checkpointer_of_which_rank_1_dies", "framework_of_which_rank_1_dies"])
def test_a_rank_that_dies_before_it_comes_to_a_save_is_not_waited_for(scenario: str, tmp_path: Path) -> None:
    volume = tmp_path / "v"
    with job(scenario, tmp_path, [volume], local_world_size=2, KILLED="before a save") as (rank, _):
        assert rank.rest()[0] == "passed 1"
        assert rank.exit_code() == 1
        log = rank.log_text()
    assert re.search(r"a rank is gone and not waited for: about=\S+/2/admitted ended=rank 1\n", log), log


@pytest.mark.parametrize("scenario", ["checkpointer_of_which_rank_1_dies", "framework_of_which_rank_1_dies"])
def test_a_rank_that_dies_before_it_resumes_is_named(scenario: str, tmp_path: Path) -> None:
    with job(scenario, tmp_path, [tmp_path / "v"], local_world_size=2, KILLED="before it resumes") as (rank, _):
        assert rank.rest() == []
        assert rank.exit_code() == 1
        assert "rank 1 left and did not name the checkpoints to choose from" in rank.log_text()


def test_a_rank_that_dies_in_another_pod_is_waited_for_until_this_pod_ends(tmp_path: Path) -> None:
    pods = [tmp_path / "a", tmp_path / "b"]
    agent = AgentServer()
    scenario = "checkpointer_of_which_rank_1_dies"
    with (
        serving(pods[0] / names.STATE_DIRECTORY / names.SOCKET, agent),
        job(scenario, tmp_path, pods, local_world_size=1, KILLED="in a save") as (rank, dead),
    ):
        rank.wait_for("passed 1")
        assert dead.exit_code() == -signal.SIGKILL
        agent.status = agent_pb2.Status(deadline=time.time() + 2.0)
        notify(rank)
        # By its next collective, or by the signal.
        assert rank.exit_code() in (1, names.NOT_DURABLE_EXIT_CODE)
        log = rank.log_text()
    assert re.search(r"not all ranks came in time: about=\S+/2/written seconds=\d+ waited_for=rank 1\n", log), log


def test_a_rank_that_hangs_in_a_save_is_waited_for_until_the_grace_period_is_nearly_over(tmp_path: Path) -> None:
    volume = tmp_path / "v"
    agent = AgentServer()
    scenario = "checkpointer_of_which_rank_1_dies"
    with (
        serving(volume / names.STATE_DIRECTORY / names.SOCKET, agent),
        job(scenario, tmp_path, [volume], local_world_size=2, STOPPED="in a save") as (rank, _),
    ):
        rank.wait_for("passed 1")
        agent.status = agent_pb2.Status(deadline=time.time() + 12.0)
        notify(rank)
        late = re.compile(r"not all ranks came in time: about=\S+/2/written seconds=\d+ waited_for=rank 1\n")
        wait_until(lambda: late.search(rank.log_text()) is not None, HANG_SECONDS, "it waits no longer")


@pytest.mark.parametrize(
    ("killed", "raises", "code"), [("in a save", "", "-9"), ("", "after its saves", "1")], ids=["killed", "raised"]
)
def test_a_launchers_sigterm_ends_a_rank_that_hangs_where_another_died(
    killed: str, raises: str, code: str, tmp_path: Path
) -> None:
    scenario = "checkpointer_of_which_rank_1_dies"
    ended = torchrun(PROGRAM, scenario, directory=tmp_path, KILLED=killed, RAISES=raises, HANGS="1", ASYNCHRONOUS="1")
    codes = re.findall(r"exitcode +: (-?\d+)", ended.output)
    assert sorted(codes) == [code, str(names.NOT_DURABLE_EXIT_CODE)], ended.output
    assert "ending without a just-in-time save: ended=rank 1" in ended.output

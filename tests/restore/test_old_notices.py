"""A restore voids the termination notices from before it: it runs in a new pod, or after all containers were ended."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.harness.agent_process import AgentProcess
from tests.harness.bounds import HANG_SECONDS
from tests.harness.warm_python import keepstep

from keepstep_agent.adapters.signal_file import SignalFile


@pytest.fixture(params=["the volume", "another volume"])
def state_directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Where the journal is."""
    return tmp_path / ("volume/.keepstep/agent" if request.param == "the volume" else "state")


@pytest.fixture
def agent(tmp_path: Path, state_directory: Path) -> Iterator[AgentProcess]:
    """One that has a termination notice."""
    (tmp_path / "bucket").mkdir()
    with AgentProcess(tmp_path / "volume", f"file://{tmp_path}/bucket", state_directory=state_directory) as made:
        made.notify_termination(grace_seconds=3600)
        yield made


def _restore(agent: AgentProcess, state_directory: Path, how: str, *, destination: str = "") -> tuple[int, str]:
    options = [f"--volume={agent.volume}", f"--state-directory={state_directory}", f"--restore={how}"]
    completed = keepstep("restore", destination or agent.destination, *options)
    return completed.returncode, completed.stderr


def _notices(agent: AgentProcess) -> tuple[bool, bool]:
    """Whether the agent has a notice, and whether a trainer that starts now reads one."""
    return agent.status().terminating, SignalFile(agent.volume).current().terminating


@pytest.mark.parametrize("how", ["whole", "lazy", "off"])
def test_a_restore_voids_the_notice_of_an_agent_that_was_killed(
    agent: AgentProcess, state_directory: Path, how: str
) -> None:
    assert _notices(agent) == (True, True)
    number = SignalFile(agent.volume).current().number
    agent.kill()
    assert _restore(agent, state_directory, how)[0] == 0
    # Nor does it come back when the agent alone is killed before it has done anything.
    for _ in range(2):
        agent.start()
        assert _notices(agent) == (False, False)
        agent.kill()
    assert SignalFile(agent.volume).current().number == number


def test_a_restore_voids_what_an_agent_that_left_in_order_has_told_trainers(
    agent: AgentProcess, state_directory: Path
) -> None:
    agent.terminate()
    assert agent.wait(HANG_SECONDS) == 0
    assert _restore(agent, state_directory, "whole")[0] == 0
    agent.start()
    assert _notices(agent) == (False, False)


def test_an_agent_that_alone_is_started_again_keeps_a_notice_that_came_after_the_restore(
    agent: AgentProcess, state_directory: Path
) -> None:
    agent.kill()
    assert _restore(agent, state_directory, "whole")[0] == 0
    agent.start()
    agent.notify_termination(grace_seconds=3600)
    agent.kill()
    agent.start()
    assert _notices(agent) == (True, True)


def test_a_restore_that_fails_voids_nothing(agent: AgentProcess, state_directory: Path) -> None:
    agent.kill()
    assert _restore(agent, state_directory, "whole", destination=f"file://{agent.volume}-elsewhere")[0] != 0
    agent.start()
    assert _notices(agent) == (True, True)


def test_a_restore_beside_a_running_agent_leaves_it_its_notice_and_says_so(
    agent: AgentProcess, state_directory: Path
) -> None:
    code, said = _restore(agent, state_directory, "whole")
    assert code == 0
    assert "restore.notices_stand" in said
    assert _notices(agent) == (True, True)
    agent.kill()
    agent.start()
    assert _notices(agent) == (True, True)

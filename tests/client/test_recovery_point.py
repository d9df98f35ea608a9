"""What a Checkpointer tells the agent of its saves: how old the recovery point may get, the stall, what is counted."""

import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from tests.client.agent_server import AgentServer, serving

import keepstep
from keepstep import Checkpointer
from keepstep_api import names

Make = Callable[..., Checkpointer]


def test_a_program_tells_the_agent_how_old_its_recovery_point_may_get(
    agent: AgentServer, make_checkpointer: Make
) -> None:
    checkpointer = make_checkpointer()
    for step in (1, 2):
        assert not checkpointer.should_save(step, recovery_point="10m", max_overhead=0.02)
    asked = [(one.recovery_point_seconds, one.max_overhead) for one in agent.requests("Register")]
    assert asked == [(0, 0), (600, 0.02)]


@pytest.mark.parametrize("has_agent", [True, False], ids=["an older agent", "no agent"])
def test_where_no_agent_keeps_the_recovery_point_the_program_saves_at_that_interval(
    has_agent: bool, volume: Path, make_checkpointer: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = AgentServer()
    server.keeps_objectives = False
    with serving(volume / names.STATE_DIRECTORY / names.SOCKET, server) if has_agent else nullcontext():
        checkpointer = make_checkpointer()
        assert not checkpointer.should_save(1, recovery_point="10m")
        now = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: now + 601)
        assert checkpointer.should_save(2, recovery_point="10m")


@pytest.mark.parametrize("wrong", [{"recovery_point": 5}, {"recovery_point": "10m", "max_overhead": 2}])
def test_an_objective_that_makes_no_sense_is_refused(wrong: dict[str, Any], make_checkpointer: Make) -> None:
    with pytest.raises(keepstep.UsageError, match=r"recovery_point|max_overhead|duration"):
        make_checkpointer().should_save(1, **wrong)


def test_the_agent_learns_how_long_training_stood_still(agent: AgentServer, make_checkpointer: Make) -> None:
    checkpointer = make_checkpointer(asynchronous=False)
    called_at = time.monotonic()
    with checkpointer.save(1) as directory:
        began_at = time.monotonic()
        (directory / "state").write_text("x")
        least_seconds = time.monotonic() - began_at
    most_seconds = time.monotonic() - called_at
    (announced,) = agent.requests("AnnounceCheckpoint")
    assert least_seconds < announced.stall_seconds < most_seconds


def test_what_the_program_counts_goes_with_the_announcement(agent: AgentServer, make_checkpointer: Make) -> None:
    checkpointer = make_checkpointer()
    for step, units in ((1, {"tokens": 1e9, "samples": 7}), (2, None)):
        with checkpointer.save(step, units=units) as directory:
            (directory / "state").write_text("x")
    counted = [{one.name: one.done for one in request.units} for request in agent.requests("AnnounceCheckpoint")]
    assert counted == [{"tokens": 1e9, "samples": 7}, {}]


@pytest.mark.parametrize(
    "units", [{"tokens": -1}, {"tokens": float("nan")}, {"": 1}, {"a b": 1}, {str(n): n for n in range(17)}, {"a": "b"}]
)
def test_what_cannot_be_counted_is_refused(units: dict[str, Any], make_checkpointer: Make) -> None:
    with pytest.raises(keepstep.UsageError, match="units"):
        make_checkpointer().save(1, units=units)

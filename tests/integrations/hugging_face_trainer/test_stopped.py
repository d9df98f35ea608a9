"""Stopped at any moment, Hugging Face's Trainer goes on where it was.

Several ranks: test_hugging_face_ranks.py beside this folder, and tests/trainers.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.client.agent_server import AgentServer
from tests.integrations.hugging_face_trainer.training import (
    BEST,
    EPOCH,
    EVALUATING,
    FINAL,
    JUST_IN_TIME,
    PERIODIC,
    RELEASE,
    SINCE_5,
    STEPS,
    At,
    announced,
    logged,
    make,
    stop,
    terminate,
    train,
    weights,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """A Trainer with these arguments that was never stopped, and has no Keepstep."""
    trained: dict[str, Any] = {}

    def train_once(**arguments: Any) -> Any:
        key = repr(arguments)
        if key not in trained:
            trained[key] = make(tmp_path_factory.mktemp("undisturbed"), **arguments)
            trained[key].train()
        return trained[key]

    return train_once


ACCUMULATING = {**EVALUATING, "gradient_accumulation_steps": 3}
EXACT = pytest.mark.skipif(RELEASE < (5,), reason="after 4.44 to 4.50 resumed in an accumulated epoch, losses differ")
NIGHTLY = pytest.mark.nightly
LATE = [SINCE_5, NIGHTLY]
BY_EPOCH = {**BEST, "eval_strategy": "epoch", "save_strategy": "epoch", "greater_is_better": False}
"""That of the last one."""


@pytest.mark.parametrize(
    ("moment", "stopped_at", "arguments"),
    [
        pytest.param(("on_train_begin", 0), 1, {}, id="the warm-up"),
        pytest.param(("on_step_begin", 0), 1, {}, id="the first step", marks=NIGHTLY),
        pytest.param(("on_step_end", 3), 3, EVALUATING, id="between steps"),
        pytest.param(("on_substep_end", 2), 3, ACCUMULATING, id="an accumulation", marks=EXACT),
        pytest.param(("on_step_end", 4), 4, EVALUATING, id="a step that is evaluated", marks=NIGHTLY),
        pytest.param(("on_prediction_step", 4), 4, EVALUATING, id="an evaluation", marks=NIGHTLY),
        pytest.param(("on_prediction_step", 4, 4), 4, EVALUATING, id="an evaluation of the same step", marks=NIGHTLY),
        pytest.param(("on_save", 4), 5, EVALUATING, id="a periodic save"),
        pytest.param(("on_step_end", EPOCH), EPOCH, BY_EPOCH, id="the end of an epoch", marks=NIGHTLY),
        pytest.param(("on_prediction_step", EPOCH), EPOCH, BY_EPOCH, id="the evaluation of an epoch", marks=NIGHTLY),
        pytest.param(("on_step_end", 5), 5, {"save_strategy": "no"}, id="training that saves nothing", marks=NIGHTLY),
        pytest.param(("on_step_end", STEPS), STEPS, EVALUATING, id="the last step", marks=LATE),
        pytest.param(("on_prediction_step", STEPS), STEPS, EVALUATING, id="the last evaluation", marks=LATE),
    ],
)  # fmt: skip
def test_stopped_at_any_moment_it_resumes_there_and_nothing_differs(
    moment: tuple[Any, ...],
    stopped_at: int,
    arguments: dict[str, Any],
    agent: AgentServer,
    volume: Path,
    undisturbed: Callable[..., Any],
) -> None:
    event, step, *after = moment
    stop(make(volume / "checkpoints", At(event, step, terminate, after=sum(after)), **arguments))
    assert announced(agent)[-1] == (stopped_at, JUST_IN_TIME)
    assert agent.requests("NotifyTermination")

    resumed = train(make(volume / "checkpoints", **arguments))
    expected = undisturbed(**arguments)
    assert logged(resumed) == logged(expected)
    assert weights(resumed) == weights(expected)
    assert resumed.state.global_step == STEPS
    assert resumed.state.best_metric == expected.state.best_metric
    if RELEASE >= (4, 50):
        assert resumed.state.best_global_step == expected.state.best_global_step


def test_started_in_a_pod_that_ends_it_leaves_before_the_first_step(agent: AgentServer, volume: Path) -> None:
    agent.terminating = True
    steps: list[int] = []
    stop(make(volume / "checkpoints", At("on_step_end", 1, lambda: steps.append(1))))
    assert steps == []
    assert announced(agent) == []


def test_a_second_notice_in_the_just_in_time_save_changes_nothing(agent: AgentServer, volume: Path) -> None:
    stop(make(volume / "checkpoints", At("on_step_end", 3, terminate), At("on_save", 3, terminate)))
    assert announced(agent) == [(3, JUST_IN_TIME)]


def test_a_stop_while_an_evaluation_is_made_up_for_leaves_it_owed(
    agent: AgentServer, volume: Path, undisturbed: Callable[..., Any]
) -> None:
    stop(make(volume / "checkpoints", At("on_prediction_step", 4, terminate), **EVALUATING))
    stop(make(volume / "checkpoints", At("on_prediction_step", 4, terminate), **EVALUATING))
    assert announced(agent) == [(4, JUST_IN_TIME)]
    assert logged(train(make(volume / "checkpoints", **EVALUATING))) == logged(undisturbed(**EVALUATING))


def test_the_callbacks_of_others_hear_of_the_end(volume: Path) -> None:
    heard: list[int] = []
    stop(
        make(
            volume / "checkpoints",
            At("on_step_end", 3, terminate),
            At("on_train_end", 3, lambda: heard.append(3)),
        )
    )
    assert heard == [3]


def test_outside_the_volume_checkpoints_are_linked_into_it_and_it_says_so(
    agent: AgentServer,
    volume: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    undisturbed: Callable[..., Any],
) -> None:
    elsewhere = tmp_path / "elsewhere"
    # The Trainer has just saved that step, elsewhere.
    stop(make(elsewhere, At("on_save", 8, terminate), save_total_limit=1))
    assert announced(agent) == [(4, PERIODIC), (8, PERIODIC)]
    assert [path.name for path in elsewhere.glob("checkpoint-*")] == ["checkpoint-8"]
    assert [path.name for path in (volume / "checkpoints").glob("outside/**/elsewhere/*")] == ["checkpoint-8"]
    assert capfd.readouterr().err.count("are linked into") == 1

    # On another machine.
    shutil.rmtree(elsewhere)
    resumed = train(make(elsewhere))
    assert logged(resumed) == logged(undisturbed())
    assert weights(resumed) == weights(undisturbed())
    assert announced(agent)[2:] == [(12, FINAL)]


def test_on_another_filesystem_the_last_step_is_stored_all_the_same(
    agent: AgentServer,
    volume: Path,
    other_filesystem: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    undisturbed: Callable[..., Any],
) -> None:
    monkeypatch.setenv("KEEPSTEP_START", "container")
    stop(make(other_filesystem / "out", At("on_save", 8, terminate), save_total_limit=1))
    assert announced(agent) == [(8, JUST_IN_TIME)]
    assert not agent.requests("BeginSave"), "an agent keeps no room for what it does not get"
    assert [path.name for path in (other_filesystem / "out").glob("checkpoint-*")] == ["checkpoint-8"]
    assert [path.name for path in (volume / "checkpoints").glob("outside/**/out/*")] == ["checkpoint-8"]
    said = capfd.readouterr().err
    assert said.count("only what is saved just in time is stored") == 1
    assert f"annotate the pod with keepstep.dev/output: {other_filesystem / 'out'}" in said
    told = {one.unprotected_directory for one in agent.requests("Register")}
    assert told == {"", str(other_filesystem / "out")}

    shutil.rmtree(other_filesystem / "out")
    # The agent of a pod with that annotation stores the files by itself.
    monkeypatch.setenv("KEEPSTEP_WATCHED", f"/elsewhere:{other_filesystem}")
    resumed = train(make(other_filesystem / "out"))
    assert logged(resumed) == logged(undisturbed())
    assert weights(resumed) == weights(undisturbed())
    assert announced(agent)[1:] == [(12, FINAL)]
    said = capfd.readouterr().err
    assert "is stored file by file" in said
    assert "annotate the pod" not in said

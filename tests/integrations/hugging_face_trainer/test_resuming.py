"""Which checkpoint a training with Hugging Face's Trainer resumes from."""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.client.agent_server import AgentServer
from tests.integrations.conftest import leaving
from tests.integrations.hugging_face_trainer.training import (
    SINCE_5,
    STEPS,
    At,
    TrainerCallback,
    logged,
    make,
    stop,
    terminate,
    train,
    weights,
)
from transformers.trainer_utils import get_last_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs


def test_a_training_resumes_from_its_own_directory_alone(volume: Path, capfd: pytest.CaptureFixture[str]) -> None:
    stop(make(volume / "checkpoints" / "run", At("on_step_end", 3, terminate)))
    other = train(make(volume / "checkpoints" / "other"))
    assert [step for step, *_ in logged(other, "loss")] == list(range(1, STEPS + 1))
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("keepstep: starting")]
    passed_over = f"{volume}/checkpoints/run/checkpoint-3, of another output directory"
    assert said == [
        f"keepstep: starting from step 0, there is no checkpoint in {volume}/checkpoints/other; "
        f"passed over: {passed_over}",
    ]

    begun: list[int] = []
    train(make(volume / "checkpoints" / "run", At("on_train_begin", 3, lambda: begun.append(3))))
    assert begun == [3]


def test_a_torn_checkpoint_that_the_trainer_would_take_is_skipped(volume: Path) -> None:
    stop(make(volume / "checkpoints", At("on_step_end", 6, terminate)))
    (volume / "checkpoints" / "checkpoint-6" / "optimizer.pt").write_bytes(b"")
    resumed: list[int] = []
    train(make(volume / "checkpoints", At("on_train_begin", 4, lambda: resumed.append(4))), resume_from_checkpoint=True)
    assert resumed == [4]


@pytest.mark.parametrize(("wish", "begins_at"), [("checkpoint-4", 4), (True, 6), (None, 6), (False, 0)])
def test_what_the_user_wants_to_resume_from_is_what_happens(wish: Any, begins_at: int, volume: Path) -> None:
    stop(make(volume / "checkpoints", At("on_step_end", 6, terminate)))
    begun: list[int] = []
    wanted = str(volume / "checkpoints" / wish) if isinstance(wish, str) else wish
    train(
        make(volume / "checkpoints", At("on_train_begin", begins_at, lambda: begun.append(begins_at))),
        resume_from_checkpoint=wanted,
    )
    assert begun == [begins_at]


@SINCE_5
def test_a_finished_training_is_not_trained_further(volume: Path) -> None:
    finished = weights(train(make(volume / "checkpoints")))
    again = train(make(volume / "checkpoints"))
    assert weights(again) == finished
    assert again.state.global_step == STEPS


@pytest.mark.parametrize("wish", ["True", "the path that a script finds"])
def test_the_newer_is_taken_of_its_own_directory_and_what_was_saved_just_in_time(
    wish: str, agent: AgentServer, volume: Path, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    trained: list[list[int]] = []

    def go_on(*callbacks: Any) -> Any:
        begins: list[int] = []
        trained.append(begins)
        count = TrainerCallback()
        count.on_step_end = lambda args, state, control, **_: begins.append(state.global_step)
        return make(elsewhere, count, *callbacks)

    def newest() -> Any:
        return True if wish == "True" else get_last_checkpoint(elsewhere)

    with leaving():
        train(go_on(At("on_step_end", 6, terminate)), resume_from_checkpoint=None)
    with leaving():
        # It begins with step 7, and is stopped when the directory has step 8.
        train(go_on(At("on_step_end", 9, terminate)), resume_from_checkpoint=newest())
    (just_in_time,) = (volume / "checkpoints").glob("outside/**/elsewhere/checkpoint-9")
    shutil.rmtree(just_in_time)
    train(go_on(), resume_from_checkpoint=newest())
    assert trained == [[1, 2, 3, 4, 5, 6], [7, 8, 9], [9, 10, 11, 12]]


def test_where_the_program_saves_weights_alone_a_just_in_time_save_is_whole(
    volume: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_one = partial(make, save_only_model=True)
    undisturbed = make_one(tmp_path / "undisturbed")
    undisturbed.train()
    stop(make_one(volume / "checkpoints", At("on_step_end", 6, terminate)))
    resumed = train(make_one(volume / "checkpoints"))
    assert weights(resumed) == weights(undisturbed)
    assert not [message for message in caplog.messages if "with a new optimizer" in message]


def test_resuming_from_weights_alone_is_said(volume: Path, caplog: pytest.LogCaptureFixture) -> None:
    stop(make(volume / "checkpoints", At("on_step_end", 6, terminate), save_only_model=True))
    shutil.rmtree(volume / "checkpoints" / "checkpoint-6")
    train(make(volume / "checkpoints", save_only_model=True))
    assert sum("with a new optimizer" in message for message in caplog.messages) == 1

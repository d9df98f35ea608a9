"""Which trainings of a process are protected, and what remains as Hugging Face has it."""

import signal
from pathlib import Path
from typing import Any

import pytest
from tests.client.agent_server import AgentServer
from tests.integrations.hugging_face_trainer.training import FINAL, STEPS, At, announced, logged, make, train

from keepstep import private_members, protect
from keepstep.integrations import hugging_face
from keepstep_api import names

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs


def test_a_second_training_in_the_same_directory_is_neither_resumed_nor_announced(
    agent: AgentServer, volume: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    first, second = (make(volume / "checkpoints", max_steps=4) for _ in range(2))
    train(first)
    train(second)
    assert [step for step, *_ in logged(second, "loss")] == [1, 2, 3, 4]
    assert announced(agent) == [(4, FINAL)]
    assert "keepstep: this training is not protected" in capfd.readouterr().err


def test_each_directory_has_a_training_of_its_own(agent: AgentServer, volume: Path) -> None:
    first, second = (make(volume / "checkpoints" / name, max_steps=4) for name in ("first", "second"))
    train(first)
    train(second)
    assert [step for step, *_ in logged(second, "loss")] == [1, 2, 3, 4]
    assert announced(agent) == [(4, FINAL)] * 2


def test_evaluation_and_prediction_outside_of_training_leave_sigterm_alone(volume: Path) -> None:
    trainer = protect(make(volume / "checkpoints"))
    before = signal.getsignal(signal.SIGTERM)
    handlers: list[Any] = []
    trainer.add_callback(At("on_prediction_step", 0, lambda: handlers.append(signal.getsignal(signal.SIGTERM))))
    trainer.evaluate()
    assert handlers == [before]


def test_every_trainer_is_protected_without_a_line_of_code(
    agent: AgentServer, volume: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import trainer as module

    monkeypatch.setattr(module.Trainer, "__init__", module.Trainer.__init__)
    hugging_face.autoload(module)
    trainer = make(volume / "checkpoints", max_steps=2)
    # Also in a program that says it.
    protect(trainer)
    trainer.train()
    assert announced(agent) == [(2, FINAL)]


def test_a_version_that_is_too_different_trains_unprotected(
    volume: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(private_members, "PRIVATE_MEMBERS", {"transformers.Trainer": ("_save_in_another_way",)})
    assert train(make(volume / "checkpoints", max_steps=2)).state.global_step == 2
    said = capfd.readouterr().err
    assert said.count("Trainer is not protected") == 1
    assert f"transformers {transformers.__version__} has no transformers.Trainer._save_in_another_way" in said


def test_inside_a_trainer_that_is_too_different_nobody_else_saves(
    agent: AgentServer, volume: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    trainer = make(volume / "checkpoints")
    protect(trainer.accelerator)
    missing = {**private_members.PRIVATE_MEMBERS, "transformers.Trainer": ("_save_in_another_way",)}
    monkeypatch.setattr(private_members, "PRIVATE_MEMBERS", missing)
    # Whoever controlled the training would save and leave at once.
    agent.terminating = True
    assert train(trainer).state.global_step == STEPS
    assert not announced(agent)
    assert "Trainer is not protected" in capfd.readouterr().err
    assert not (volume / names.STATE_DIRECTORY / names.RECORDS_DIRECTORY).exists()

"""Which checkpoints are claimed, recorded and announced, and what becomes of a save that fails."""

import logging
from pathlib import Path
from typing import Any

import pytest
from tests.client.agent_server import AgentServer
from tests.harness.claims import claims
from tests.integrations.hugging_face_trainer.training import (
    EVALUATING,
    FINAL,
    JUST_IN_TIME,
    PERIODIC,
    RELEASE,
    STEPS,
    At,
    announced,
    make,
    stop,
    terminate,
    train,
)

from keepstep.checkpoints.records import read_records
from keepstep_api import names, signal_file

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs


def test_a_checkpoint_is_claimed_from_its_first_file_until_it_is_announced(agent: AgentServer, volume: Path) -> None:
    seen: list[list[str]] = []
    trainer = make(volume / "checkpoints", At("on_save", 4, lambda: seen.append(claims(volume))), max_steps=8)
    save = trainer.save_model

    def save_model(*arguments: Any, **keywords: Any) -> None:
        seen.append(claims(volume))
        save(*arguments, **keywords)

    trainer.save_model = save_model
    train(trainer)
    # In the order of what came: the model is the first of its files, and the callbacks of others come at the end.
    assert seen == [["checkpoints/checkpoint-4"]] * 2 + [["checkpoints/checkpoint-8"]]
    assert claims(volume) == []


def test_every_checkpoint_is_recorded_and_announced_and_the_last_one_is_final(agent: AgentServer, volume: Path) -> None:
    train(make(volume / "checkpoints", max_steps=10, save_total_limit=2))
    assert announced(agent) == [(4, PERIODIC), (8, PERIODIC), (10, FINAL)]
    assert [request.path for request in agent.requests("AnnounceCheckpoint")] == [
        str(volume / "checkpoints" / f"checkpoint-{step}") for step in (4, 8, 10)
    ]
    # The Trainer has deleted the oldest by its own rules.
    records = read_records(volume / names.STATE_DIRECTORY / names.RECORDS_DIRECTORY)
    assert [(record.step, record.announced) for record in records] == [(10, True), (8, True)]
    assert sorted(path.name for path in (volume / "checkpoints").glob("checkpoint-*")) == [
        "checkpoint-10",
        "checkpoint-8",
    ]


def fail() -> None:
    raise OSError("no space left on device")


def test_a_periodic_save_that_fails_is_the_programs_and_the_agent_keeps_no_room(
    agent: AgentServer, volume: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make(volume / "checkpoints")
    monkeypatch.setattr(trainer, "_save_rng_state", lambda _: fail())
    with pytest.raises(OSError, match="no space left"):
        train(trainer)
    assert not announced(agent)
    assert len(agent.requests("AbortSave")) == 1


def test_a_just_in_time_save_that_fails_costs_only_itself(
    agent: AgentServer, volume: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make(volume / "checkpoints", At("on_step_end", 6, terminate))
    write = trainer._save_rng_state
    monkeypatch.setattr(trainer, "_save_rng_state", lambda to: fail() if "checkpoint-6" in to else write(to))
    stop(trainer, code=75)
    assert announced(agent) == [(4, PERIODIC)]
    assert train(make(volume / "checkpoints")).state.global_step == STEPS


def test_with_no_room_only_the_last_checkpoint_is_written(agent: AgentServer, volume: Path) -> None:
    agent.admitted = False
    train(make(volume / "checkpoints"))
    assert announced(agent) == [(STEPS, FINAL)]
    assert [path.name for path in (volume / "checkpoints").glob("checkpoint-*")] == [f"checkpoint-{STEPS}"]


def test_an_operator_has_it_save_and_go_on(agent: AgentServer, volume: Path) -> None:
    signal_path = volume / names.STATE_DIRECTORY / names.SIGNAL_FILE
    signal_path.write_bytes(signal_file.encode(signal_file.SaveSignal()))

    def request_save() -> None:
        with signal_path.open("r+b") as file:
            file.write(signal_file.encode(signal_file.SaveSignal(number=1)))

    train(make(volume / "checkpoints", At("on_step_end", 6, request_save), max_steps=8, **EVALUATING))
    assert announced(agent) == [(4, PERIODIC), (6, PERIODIC), (8, FINAL)]


@pytest.mark.skipif(RELEASE < (5,), reason="older releases have no just-in-time saving of their own")
def test_its_own_just_in_time_saving_is_replaced(
    agent: AgentServer, volume: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "keepstep")
    stop(make(volume / "checkpoints", At("on_step_end", 3, terminate), enable_jit_checkpoint=True))
    assert announced(agent) == [(3, JUST_IN_TIME)]
    assert sum("enable_jit_checkpoint is replaced" in message for message in caplog.messages) == 1


def test_a_relative_directory_in_the_volume_is_announced_by_its_whole_path(
    agent: AgentServer, volume: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    volume.mkdir(exist_ok=True)
    monkeypatch.chdir(volume)
    stop(make(Path("out"), At("on_step_end", 6, terminate)))
    paths = [request.path for request in agent.requests("AnnounceCheckpoint")]
    assert paths == [str(volume / "out" / f"checkpoint-{step}") for step in (4, 6)]
    assert train(make(Path("out"))).state.global_step == STEPS
    assert len(announced(agent)) == 4, "it resumed after step 6, and saved the steps 8 and 12"

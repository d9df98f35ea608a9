"""Which checkpoints are claimed, recorded and announced, and what a save of Keepstep's own costs."""

import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.client.agent_server import AgentServer
from tests.harness.bounds import HANG_SECONDS
from tests.harness.claims import claims
from tests.integrations.lightning_trainer.training import (
    BY_EPOCH,
    EPOCH,
    FINAL,
    PERIODIC,
    RELEASE,
    At,
    ModelCheckpoint,
    announced,
    fit,
    make,
    steps,
)

from keepstep.asynchronous_saves.empty_file import EmptyFile
from keepstep.checkpoints.records import read_records
from keepstep.integrations.lightning import checkpoint
from keepstep_api import names, signal_file

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs


def test_a_checkpoint_is_claimed_while_it_is_written(agent: AgentServer, volume: Path) -> None:
    seen: list[list[str]] = []
    fit(make(volume / "checkpoints", At("on_save_checkpoint", 4, lambda: seen.append(claims(volume))), max_steps=4))
    assert seen == [["checkpoints/epoch=0-step=4.ckpt"]]
    assert claims(volume) == []


@pytest.mark.parametrize("elsewhere", [True, False])
def test_a_second_file_of_the_same_state_is_not_claimed(
    elsewhere: bool, agent: AgentServer, volume: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent leaves out of snapshots what was ever claimed, and nobody announces such a file: it would be lost."""
    monkeypatch.setattr(checkpoint, "can_be_elsewhere", lambda _: elsewhere)
    seen: list[list[str]] = []
    output = volume / "checkpoints"
    saving = ModelCheckpoint(output, every_n_train_steps=4, save_last=True)
    looks = [At("on_save_checkpoint", 4, lambda: seen.append(claims(volume)), after=saves) for saves in (0, 1)]
    fit(make(output, saving, *looks, every=0, enable_checkpointing=True, max_steps=4))
    assert seen == [["checkpoints/epoch=0-step=4.ckpt"], []]


def test_every_checkpoint_is_recorded_and_announced_and_the_last_one_is_final(agent: AgentServer, volume: Path) -> None:
    fit(make(volume / "checkpoints", max_steps=8))
    assert announced(agent) == [(4, PERIODIC), (8, FINAL)]
    records = read_records(volume / names.STATE_DIRECTORY / names.RECORDS_DIRECTORY)
    assert [(record.step, record.announced) for record in records][:1] == [(8, True)]
    # ModelCheckpoint has deleted the older one by its own rules.
    assert [path.name for path in (volume / "checkpoints").iterdir()] == ["epoch=0-step=8.ckpt"]


def test_the_last_epochs_checkpoint_is_final_too(agent: AgentServer, volume: Path) -> None:
    saving = ModelCheckpoint(volume / "checkpoints")
    fit(
        make(volume / "checkpoints", saving, every=0, enable_checkpointing=True, max_steps=-1, max_epochs=2, **BY_EPOCH)
    )
    assert announced(agent) == [(EPOCH, PERIODIC), (2 * EPOCH, FINAL)]


def test_a_second_file_of_the_same_state_is_not_announced_and_weights_alone_never(
    agent: AgentServer, volume: Path
) -> None:
    output = volume / "checkpoints"
    callbacks = [
        ModelCheckpoint(output, filename="weights", every_n_train_steps=3, save_weights_only=True),
        ModelCheckpoint(output, every_n_train_steps=4, save_last=True),
    ]
    fit(make(output, *callbacks, every=0, enable_checkpointing=True, max_steps=6))
    # Older releases also write it at the end, two steps later.
    ends_with_last = ["last.ckpt"] if RELEASE < (2, 6) else []
    announced_names = [Path(request.path).name for request in agent.requests("AnnounceCheckpoint")]
    assert announced_names == ["epoch=0-step=4.ckpt", *ends_with_last]
    assert (output / "last.ckpt").exists()


@pytest.mark.parametrize("last", [True, "link"])
def test_the_last_checkpoint_beside_the_best_one_costs_no_wait(
    last: bool | str, volume: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    going_on, find = threading.Event(), EmptyFile.find

    def find_when_training_goes_on(file: EmptyFile, root: Path) -> Path | None:
        assert going_on.wait(HANG_SECONDS)
        return find(file, root)

    def train(output: Path) -> None:
        saving = ModelCheckpoint(output, every_n_train_steps=2, save_last=last)
        # Callbacks of checkpoints come last.
        at = At("on_train_batch_start", 2, going_on.set)
        fit(make(output, at, saving, every=0, enable_checkpointing=True, max_steps=4))

    monkeypatch.setattr(EmptyFile, "find", find_when_training_goes_on)
    train(volume / "checkpoints")
    monkeypatch.setenv(names.ENV_ASYNCHRONOUS_SAVES, "false")
    monkeypatch.setenv(names.ENV_VOLUME, str(tmp_path / "w"))
    train(tmp_path / "w" / "checkpoints")
    found = sorted((volume / "checkpoints").glob("*.ckpt"))
    assert [path.name for path in found] == ["epoch=0-step=4.ckpt", "last.ckpt"]
    assert found[1].is_symlink() is (last == "link")
    for path in found:
        ours, theirs = (
            torch.load(folder / "checkpoints" / path.name, weights_only=False) for folder in (volume, tmp_path / "w")
        )
        assert ours["global_step"] == theirs["global_step"] == 4
        assert ours["state_dict"].keys() == theirs["state_dict"].keys()
        assert all(torch.equal(value, theirs["state_dict"][name]) for name, value in ours["state_dict"].items())


def test_an_operator_has_it_save_and_go_on(agent: AgentServer, volume: Path) -> None:
    signal_path = volume / names.STATE_DIRECTORY / names.SIGNAL_FILE
    signal_path.write_bytes(signal_file.encode(signal_file.SaveSignal()))
    numbers = iter((1, 2))

    def request_save() -> None:
        with signal_path.open("r+b") as file:
            file.write(signal_file.encode(signal_file.SaveSignal(number=next(numbers))))

    fit(make(volume / "checkpoints", *(At("on_train_batch_end", step, request_save) for step in (3, 7)), max_steps=8))
    assert announced(agent) == [(3, PERIODIC), (4, PERIODIC), (7, PERIODIC), (8, FINAL)]
    assert [path.name for path in (volume / "checkpoints").glob("keepstep-*")] == ["keepstep-step=7.ckpt"]


def test_a_save_of_ours_that_fails_costs_only_itself(agent: AgentServer, volume: Path) -> None:
    output = volume / "checkpoints"
    signal_path = volume / names.STATE_DIRECTORY / names.SIGNAL_FILE
    signal_path.write_bytes(signal_file.encode(signal_file.SaveSignal()))

    def request_save() -> None:
        with signal_path.open("r+b") as file:
            file.write(signal_file.encode(signal_file.SaveSignal(number=1)))

    trainer = make(output, At("on_train_batch_end", 3, request_save), max_steps=4)
    write = trainer.strategy.save_checkpoint

    def write_unless_ours(checkpoint: Any, path: Any, **arguments: Any) -> None:
        if "keepstep" in Path(path).name:
            raise OSError("no space left on device")
        write(checkpoint, path, **arguments)

    trainer.strategy.save_checkpoint = write_unless_ours
    assert steps(fit(trainer)) == [1, 2, 3, 4]
    assert announced(agent) == [(4, FINAL)]


def test_a_name_that_is_used_again_is_never_without_a_checkpoint(agent: AgentServer, volume: Path) -> None:
    last, there, watching = volume / "checkpoints" / "last.ckpt", [], [True]

    def look(event: str, arguments: tuple[Any, ...]) -> None:
        # Before each change of a name: what one of them took away, the next one finds missing.
        if watching and event in ("os.rename", "os.remove", "shutil.move"):
            there.append(os.path.lexists(last))

    # For the life of the process: nothing removes a hook.
    sys.addaudithook(look)
    saving = ModelCheckpoint(volume / "checkpoints", every_n_train_steps=2, save_last=True)
    fit(make(volume / "checkpoints", saving, every=0, enable_checkpointing=True, max_steps=8))
    watching.clear()
    assert there.count(True) > 3
    assert all(there[there.index(True) :])

"""Where checkpoints go: into the volume, unless the program has chosen a directory."""

import logging
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.client.agent_server import AgentServer
from tests.harness.bounds import HANG_SECONDS
from tests.harness.run_process import RunProcess
from tests.harness.warm_python import TRAINER_ENVIRONMENT
from tests.integrations.conftest import leaving
from tests.integrations.lightning_trainer.training import (
    BY_EPOCH,
    EPOCH,
    FINAL,
    JUST_IN_TIME,
    PERIODIC,
    At,
    Model,
    ModelCheckpoint,
    announced,
    fit,
    fit_unfinished,
    make,
    steps,
    stop,
    terminate,
)
from tests.servers.server import Bucket

from keepstep import protect
from keepstep_api import names

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs

BY_DEFAULT = Path(__file__).with_name("lightning_by_default.py")


def test_outside_the_volume_checkpoints_are_linked_into_it(
    agent: AgentServer, volume: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    stop(make(tmp_path / "elsewhere", At("on_train_batch_end", 11, terminate)))
    assert announced(agent) == [(4, PERIODIC), (8, PERIODIC), (11, JUST_IN_TIME)]
    assert capfd.readouterr().err.count("are linked into") == 1
    assert steps(fit(make(tmp_path / "elsewhere", max_steps=12))) == [12]


def test_on_another_filesystem_what_is_saved_just_in_time_is_stored(
    agent: AgentServer, volume: Path, other_filesystem: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    stop(make(other_filesystem / "out", At("on_train_batch_end", 11, terminate)))
    assert announced(agent) == [(11, JUST_IN_TIME)]
    assert capfd.readouterr().err.count("only what is saved just in time is stored") == 1
    assert steps(fit(make(other_filesystem / "out", max_steps=12))) == [12]


def test_a_save_that_nobody_stores_is_not_taken_for_the_one_just_in_time(
    agent: AgentServer, volume: Path, other_filesystem: Path
) -> None:
    # In the step that a ModelCheckpoint saves.
    stop(make(other_filesystem / "out", At("on_train_batch_end", 8, terminate)))
    assert announced(agent) == [(8, JUST_IN_TIME)]
    assert steps(fit(make(other_filesystem / "out", max_steps=9))) == [9]


def make_by_default(*callbacks: Any, **arguments: Any) -> Any:
    """A Trainer whose program says nothing of where its checkpoints or its logs go."""
    settings = {"enable_checkpointing": True, "max_steps": -1, "max_epochs": 1, **BY_EPOCH, **arguments}
    return make(Path(), *callbacks, every=0, **settings)


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


@pytest.mark.parametrize("logger", [True, False])
def test_a_program_that_names_no_directory_has_its_checkpoints_stored(
    agent: AgentServer, volume: Path, elsewhere: Path, caplog: pytest.LogCaptureFixture, logger: bool
) -> None:
    with caplog.at_level(logging.INFO, logger="keepstep"):
        fit(make_by_default(logger=logger))
    assert [path.name for path in (volume / "checkpoints").iterdir()] == ["epoch=0-step=10.ckpt"]
    assert announced(agent) == [(EPOCH, FINAL)]
    assert sum("names no directory" in message for message in caplog.messages) == 1
    assert not list(elsewhere.glob("**/*.ckpt"))


def test_several_callbacks_without_a_directory_share_it(agent: AgentServer, volume: Path, elsewhere: Path) -> None:
    callbacks = [ModelCheckpoint(filename="first", every_n_train_steps=4)]
    callbacks += [ModelCheckpoint(filename="second", every_n_train_steps=5)]
    fit(make_by_default(*callbacks))
    assert {path.name for path in (volume / "checkpoints").iterdir()} == {"first.ckpt", "second.ckpt"}
    assert not list(elsewhere.glob("**/*.ckpt"))


def test_a_callback_that_the_model_brings_writes_there_too(
    agent: AgentServer, volume: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    brought = [ModelCheckpoint(filename="brought", every_n_train_steps=4)]
    monkeypatch.setattr(Model, "configure_callbacks", lambda self: brought)
    fit(make_by_default())
    assert [path.name for path in (volume / "checkpoints").iterdir()] == ["brought.ckpt"]


@pytest.mark.nightly
def test_what_it_saves_by_default_survives_the_loss_of_the_volume(rclone_bucket: Bucket, tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    command = (sys.executable, str(BY_DEFAULT))
    lines = []
    for crash_at, code in ((7, 7), (-1, 0)):
        volume = tmp_path / f"volume-{code}"
        trainer = {"CRASH_AT": crash_at, "WORK": tmp_path / "work"}
        options: dict[str, Any] = {"command": command, "endpoint_url": rclone_bucket.endpoint_url}
        options |= {"trainer": trainer, "environment": TRAINER_ENVIRONMENT}
        with RunProcess(volume, rclone_bucket.destination, **options) as run:
            assert run.wait(HANG_SECONDS) == code, run.output()
        lines.append([line for line in run.output().splitlines() if line.startswith("step=")])
    assert lines == [[f"step={step}" for step in range(1, 8)], [f"step={step}" for step in range(6, 16)]]


@pytest.mark.parametrize("of", ["the Trainer", "a logger", "a callback"])
def test_a_directory_that_the_program_chose_stays(
    agent: AgentServer, volume: Path, elsewhere: Path, capfd: pytest.CaptureFixture[str], of: str
) -> None:
    from lightning.pytorch.loggers import CSVLogger

    chosen = elsewhere / "chosen"
    arguments: dict[str, Any] = {
        "the Trainer": {"default_root_dir": chosen},
        "a logger": {"logger": CSVLogger(chosen)},
        "a callback": {},
    }[of]
    trainer = make_by_default(**arguments)
    if of == "a callback":
        trainer.checkpoint_callback.dirpath = str(chosen)
    fit(trainer)
    assert len(list(chosen.glob("**/*.ckpt"))) == 1
    assert not list(volume.glob("checkpoints/*.ckpt"))
    assert len(list(volume.glob("checkpoints/outside/**/*.ckpt"))) == 1
    assert announced(agent) == [(EPOCH, FINAL)]
    assert capfd.readouterr().err.count("are linked into") == 1


def test_a_start_finds_its_checkpoint_in_the_version_of_another_one(
    agent: AgentServer, volume: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A logger numbers the folder anew at each start."""
    from lightning.pytorch.loggers import CSVLogger

    (volume / "work").mkdir(parents=True)
    monkeypatch.chdir(volume / "work")
    stop(make_by_default(At("on_train_batch_end", 7, terminate), logger=CSVLogger("logs"), max_epochs=2))
    assert steps(fit(make_by_default(logger=CSVLogger("logs"), max_epochs=2)))[0] == 8
    other = make_by_default(logger=CSVLogger("logs", version=0), max_epochs=2)
    assert steps(fit(other))[0] == 1, "a program that chooses its versions means each of them"


def test_a_checkpoint_callback_of_the_model_has_its_own_directory(agent: AgentServer, volume: Path) -> None:
    def train(*callbacks: Any) -> Any:
        trainer = make(volume, *callbacks, every=0, enable_checkpointing=True)
        model = Model()
        model.configure_callbacks = lambda: [ModelCheckpoint(volume / "fold", every_n_train_steps=4)]
        fit_unfinished(protect(trainer), model)
        return model

    with leaving():
        train(At("on_train_batch_end", 7, terminate))
    assert steps(train())[0] == 8


def test_a_logger_without_a_name_may_number_folders_of_the_checkpoint_directory(
    agent: AgentServer, volume: Path
) -> None:
    from lightning.pytorch.loggers import CSVLogger

    def train(*callbacks: Any) -> Any:
        return make_by_default(*callbacks, logger=CSVLogger(volume / "checkpoints", name=""), max_epochs=2)

    stop(train(At("on_train_batch_end", 7, terminate)))
    assert steps(fit(train()))[0] == 8


def test_without_a_volume_or_without_checkpoints_nothing_is_moved(
    volume: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert protect(make_by_default(fast_dev_run=True)).checkpoint_callback.dirpath is None
    assert protect(make(volume, every=0)).checkpoint_callback is None
    monkeypatch.delenv(names.ENV_VOLUME)
    assert protect(make_by_default()).checkpoint_callback.dirpath is None


def test_a_validation_before_the_training_and_the_best_checkpoint_after_it_find_the_same_directory(
    agent: AgentServer, volume: Path, elsewhere: Path
) -> None:
    trainer = protect(make_by_default())
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(8, 8), torch.randn(8, 1)))
    trainer.validate(Model(), loader, verbose=False)
    model = fit(trainer)
    assert announced(agent) == [(EPOCH, FINAL)]
    trainer.validate(model, loader, ckpt_path="best", verbose=False)
    fit_unfinished(trainer, model, ckpt_path="last")


def test_another_training_of_the_process_does_not_write_among_the_protected_ones_checkpoints(
    agent: AgentServer, volume: Path, elsewhere: Path
) -> None:
    first, second = protect(make_by_default()), protect(make_by_default())
    fit(first)
    fit(second)
    assert len(list((volume / "checkpoints").iterdir())) == 1
    assert len(list(elsewhere.glob("**/*.ckpt"))) == 1

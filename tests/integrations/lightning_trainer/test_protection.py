"""Which trainings of a process are protected, and what remains as Lightning has it."""

import copy
import pickle
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.client.agent_server import AgentServer
from tests.integrations.lightning_trainer.training import FINAL, At, Model, announced, fit, make, steps
from tests.torch_loop.torchrun import torchrun

from keepstep import protect
from keepstep.integrations import lightning as integration
from keepstep_api import names

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs
UNLIKE_RANKS = Path(__file__).with_name("lightning_unlike_ranks.py")


def test_a_rank_that_alone_is_not_protected_holds_nobody_up(tmp_path: Path) -> None:
    ended = torchrun(UNLIKE_RANKS, str(tmp_path / "v"), directory=tmp_path / "v", libraries=["lightning.pytorch"])
    assert ended.code == 0, ended.output
    assert ended.lines("done") == ["0 3", "1 3"]
    assert {path.name for path in (tmp_path / "v").glob("*.ckpt")} == {f"step={step}.ckpt" for step in (1, 2, 3)}
    assert ended.output.count("is not protected") == 1


def test_a_second_training_in_the_same_directory_is_neither_resumed_nor_announced(
    agent: AgentServer, volume: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    first, second = (make(volume / "checkpoints", max_steps=4) for _ in range(2))
    fit(first)
    assert steps(fit(second)) == [1, 2, 3, 4]
    assert announced(agent) == [(4, FINAL)]
    assert "keepstep: this training is not protected" in capfd.readouterr().err


def test_each_directory_has_a_training_of_its_own(agent: AgentServer, volume: Path) -> None:
    first, second = (make(volume / "checkpoints" / name, max_steps=4) for name in ("first", "second"))
    fit(first)
    assert steps(fit(second)) == [1, 2, 3, 4]
    assert announced(agent) == [(4, FINAL)] * 2


def test_a_tuners_trial_is_not_the_training(agent: AgentServer, volume: Path, tmp_path: Path) -> None:
    from lightning.pytorch.tuner import Tuner

    trainer = protect(make(volume / "checkpoints", max_steps=4, default_root_dir=tmp_path))
    model = Model()
    model.lr = 1e-2
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(80, 8), torch.randn(80, 1)))
    Tuner(trainer).lr_find(model, loader, loader, num_training=8)
    assert announced(agent) == []
    fit(trainer)
    assert announced(agent) == [(4, FINAL)]


def test_validation_outside_of_training_leaves_sigterm_alone(volume: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    trainer = protect(make(volume / "checkpoints"))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(8, 8), torch.randn(8, 1)))
    trainer.validate(Model(), loader, verbose=False)
    assert signal.getsignal(signal.SIGTERM) == before
    assert not (volume / names.STATE_DIRECTORY).exists()


def test_slurms_requeueing_keeps_the_signals(
    agent: AgentServer, volume: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from lightning.pytorch.plugins.environments import SLURMEnvironment

    for name, value in {"SLURM_NTASKS": "1", "SLURM_JOB_NAME": "train", "SLURM_JOB_ID": "1"}.items():
        monkeypatch.setenv(name, value)
    for name in ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"):
        monkeypatch.setenv(name, "0")
    handlers: list[Any] = []
    look = At("on_train_batch_end", 2, lambda: handlers.append(signal.getsignal(signal.SIGTERM)))
    environment = SLURMEnvironment(auto_requeue=True, requeue_signal=signal.SIGUSR2)
    fit(make(volume / "checkpoints", look, max_steps=4, plugins=[environment]))
    assert type(handlers[0]).__name__ == "_HandlersCompose"
    assert announced(agent) == [(4, FINAL)]
    assert capfd.readouterr().err.count("SLURM's auto-requeue has the signals") == 1


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_every_trainer_is_protected_without_a_line_of_code(
    package: str, agent: AgentServer, volume: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = pytest.importorskip(f"{package}.trainer.trainer")
    monkeypatch.setattr(module.Trainer, "__init__", module.Trainer.__init__)
    integration.autoload(module)
    trainer = module.Trainer(enable_checkpointing=False, logger=False, accelerator="cpu")
    # Also in a program that says it.
    assert sum("KeepstepProtection" in type(callback).__name__ for callback in protect(trainer).callbacks) == 1


def test_a_trainer_can_still_be_copied_and_sent_to_another_process(volume: Path) -> None:
    trainer = protect(make(volume / "checkpoints"))
    for other in (copy.deepcopy(trainer), pickle.loads(pickle.dumps(trainer))):
        assert other.callbacks[-1] is not trainer.callbacks[-1]
        assert type(other.callbacks[-1]).__name__ == "KeepstepProtection"


def test_a_version_that_is_too_different_trains_unprotected(
    agent: AgentServer, volume: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    trainer = make(volume / "checkpoints", max_steps=5)
    signals = trainer._signal_connector
    trainer._signal_connector = Renamed()
    assert protect(trainer) is trainer
    trainer.callbacks.insert(-1, At("on_fit_start", 0, lambda: setattr(trainer, "_signal_connector", signals)))
    assert steps(fit(trainer)) == [1, 2, 3, 4, 5]
    assert announced(agent) == []
    assert capfd.readouterr().err.count("Trainer is not protected") == 1


class Renamed:
    """Has nothing that we know of."""

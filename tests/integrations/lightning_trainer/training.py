"""A small training with Lightning's real Trainer, stopped by a real SIGTERM, in this process."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version
from tests.client.agent_server import AgentServer
from tests.integrations.conftest import leaving

from keepstep import protect
from keepstep.framework_run import FrameworkRun
from keepstep_api.v1 import agent_pb2

pl: Any = pytest.importorskip("lightning.pytorch")
torch = pytest.importorskip("torch")
torchdata = pytest.importorskip("torchdata.stateful_dataloader")
ModelCheckpoint: Any = pl.callbacks.ModelCheckpoint
RELEASE = Version(pl.__version__).release
"""tests/compatibility runs this folder's tests with older ones."""
STEPS, EPOCH = 24, 10
BY_EPOCH = {"val_check_interval": 1.0, "check_val_every_n_epoch": 1}
PERIODIC, JUST_IN_TIME, FINAL = agent_pb2.KIND_PERIODIC, agent_pb2.KIND_JUST_IN_TIME, agent_pb2.KIND_FINAL


class Model(pl.LightningModule):  # type: ignore[misc]
    """Every step depends on the random generators, and everything that was computed is written down."""

    def __init__(self, *, plateau: bool = False) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Dropout(0.3), torch.nn.Linear(16, 1)
        )
        self.plateau = plateau
        self.computed: list[tuple[Any, ...]] = []

    def training_step(self, batch: Any, index: int) -> Any:
        loss = self._loss(batch)
        self.computed.append(
            ("train", self.current_epoch, self.global_step, loss.item(), self.optimizers().param_groups[0]["lr"])
        )
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("validation_loss", self._loss(batch))

    def on_validation_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.computed.append(
                ("validation", self.global_step, self.trainer.callback_metrics["validation_loss"].item())
            )

    def on_train_epoch_end(self) -> None:
        self.computed.append(("epoch", self.current_epoch, self.global_step))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, mode="max")
        plateau = {
            "scheduler": scheduler,
            "monitor": "validation_loss",
            "interval": "step",
            "frequency": 5,
            "strict": False,
        }
        return {"optimizer": optimizer, **({"lr_scheduler": plateau} if self.plateau else {})}

    def _loss(self, batch: Any) -> Any:
        features, targets = batch
        return torch.nn.functional.mse_loss(self.layers(features), targets)


class At(pl.Callback):  # type: ignore[misc]
    """Does something once, at a hook after that many steps; `after`: at that hook's next but so many."""

    def __init__(self, hook: str, step: int, what: Callable[[], object], *, after: int = 0) -> None:
        self._step = step
        self._left = after + 1
        self._what = what
        setattr(self, hook, self._on_hook)

    def _on_hook(self, trainer: Any, *_: Any, **__: Any) -> None:
        if trainer.global_step == self._step:
            self._left -= 1
            if self._left == 0:
                self._what()


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def make(output: Path, *callbacks: Any, every: int = 4, **arguments: Any) -> Any:
    """A Trainer that saves after every so many steps."""
    # As in a process of its own.
    FrameworkRun._trained.clear()
    pl.seed_everything(7)
    saving = [ModelCheckpoint(output, every_n_train_steps=every)] if every else []
    settings = {
        "max_steps": STEPS,
        "val_check_interval": 5,
        "check_val_every_n_epoch": None,
        "limit_val_batches": 3,
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": bool(every),
        **arguments,
    }
    return pl.Trainer(callbacks=[*callbacks, *saving], **settings)


def fit(trainer: Any, *, plateau: bool = False, **arguments: Any) -> Model:
    """Train, protected; the model."""
    model = Model(plateau=plateau)
    fit_unfinished(protect(trainer), model, **arguments)
    return model


def stateful(data: Any) -> Any:
    sampler = torch.utils.data.DistributedSampler(data, num_replicas=1, rank=0)
    return torchdata.StatefulDataLoader(data, batch_size=8, sampler=sampler)


def fit_unfinished(trainer: Any, model: Model, *, loader: Callable[[Any], Any] = stateful, **arguments: Any) -> None:
    """Raises what the training ends with."""
    features = torch.randn(8 * EPOCH, 8, generator=torch.Generator().manual_seed(1))
    data = torch.utils.data.TensorDataset(features, features.square().sum(dim=1, keepdim=True))
    trainer.fit(
        model,
        loader(data),
        torchdata.StatefulDataLoader(data, batch_size=8),
        **arguments,
    )


def stop(trainer: Any, *, plateau: bool = False, **arguments: Any) -> Model:
    """Train until the notice that one of its callbacks sends."""
    model = Model(plateau=plateau)
    with leaving():
        fit_unfinished(protect(trainer), model, **arguments)
    return model


def weights(model: Model) -> list[Any]:
    return [parameter.tolist() for parameter in model.parameters()]


def announced(agent: AgentServer) -> list[tuple[int, int]]:
    return [(request.step, request.kind) for request in agent.requests("AnnounceCheckpoint")]


def steps(model: Model) -> list[int]:
    """Those that it trained."""
    return [entry[2] + 1 for entry in model.computed if entry[0] == "train"]

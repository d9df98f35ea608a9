"""A small training with Lightning: `lightning_program.py CKPT_PATH STEPS`. Prints the steps that it trained, and what
it loaded."""

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import keepstep
from keepstep_api import names


class Tiny(pl.LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.trained: list[int] = []
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: Any, index: int) -> Any:
        self.trained.append(self.global_step + 1)
        return self.layer(batch[0]).square().mean()

    def test_step(self, batch: Any, index: int) -> None:
        self.log("test", self.layer(batch[0]).square().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader() -> Any:
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(64, 4)))


def main() -> None:
    warnings.simplefilter("ignore")
    chosen, steps = sys.argv[1] or None, int(sys.argv[2])
    saving = ModelCheckpoint(
        Path(os.environ[names.ENV_CHECKPOINT_DIRECTORY]),
        filename="last" if chosen == "last" else "{step}",
        every_n_train_steps=4,
    )
    trainer = pl.Trainer(
        max_steps=steps,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[saving],
    )
    keepstep.protect(trainer)
    model = Tiny()
    if chosen == "best":
        trainer.fit(model, loader())
        trainer.test(model, loader(), ckpt_path="best", verbose=False)
    else:
        trainer.fit(model, loader(), ckpt_path=chosen)
    print(json.dumps([model.trained, trainer.ckpt_path]))


if __name__ == "__main__":
    main()

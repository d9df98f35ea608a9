"""Two ranks of Lightning that resume from a checkpoint that the program names. Rank 1 is not protected: its volume is a
file.

torchrun … tests/integrations/lightning_trainer/lightning_unlike_ranks.py <directory>
"""

import os
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import keepstep
from keepstep.ranks import rendezvous
from keepstep_api import names

MEET_SECONDS = 5.0
"""How long rank 0 waits for the one that does not come."""


class Model(pl.LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: Any, _: int) -> Any:
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def trainer(directory: Path, steps: int) -> pl.Trainer:
    return pl.Trainer(
        max_steps=steps,
        accelerator="cpu",
        devices=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(directory, filename="{step}", every_n_train_steps=1, save_top_k=-1)],
    )


def main() -> None:
    directory = Path(sys.argv[1])
    directory.mkdir(exist_ok=True)
    rank = os.environ["RANK"]
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(32, 4)), batch_size=4)
    trainer(directory, 1).fit(Model(), data)

    if rank == "1":
        (directory / "file").touch()
        os.environ[names.ENV_VOLUME] = str(directory / "file")
        os.environ.pop(names.ENV_CHECKPOINT_DIRECTORY)
    rendezvous.rendezvous.__kwdefaults__["seconds"] = MEET_SECONDS  # type: ignore[index]
    protected = trainer(directory, 3)
    keepstep.protect(protected)
    protected.fit(Model(), data, ckpt_path=directory / "step=1.ckpt")
    print(f"done {rank} {protected.global_step}", flush=True)


if __name__ == "__main__":
    main()

"""A Lightning Trainer that survives its pod: Keepstep saves it in time, and it resumes where it was.

    torchrun --nproc-per-node 2 examples/lightning_trainer.py --steps 200

The result is bit-identical, in the midst of an epoch too. For that the loader is torchdata's StatefulDataLoader, with
torch's DataLoader Lightning would begin the epoch's data anew, and the order follows from the sampler's seed and epoch.
"""

import argparse
import os
from pathlib import Path

import lightning.pytorch as lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import Dataset, DistributedSampler, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import keepstep

DIRECTORY = Path(os.environ.get("KEEPSTEP_CHECKPOINT_DIRECTORY", "checkpoints"))


class Regression(lightning.LightningModule):  # type: ignore[misc]
    def __init__(self, data: Dataset[tuple[torch.Tensor, ...]]) -> None:
        super().__init__()
        self.data = data
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(64, 1)
        )

    def training_step(self, batch: list[torch.Tensor], batch_index: int) -> torch.Tensor:
        inputs, targets = batch
        loss = torch.nn.functional.mse_loss(self.layers(inputs), targets)
        if self.trainer.is_global_zero:
            print(f"step={self.global_step + 1} loss={loss.item()!r}", flush=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_index: int) -> None:
        inputs, targets = batch
        self.log("val_loss", torch.nn.functional.mse_loss(self.layers(inputs), targets), sync_dist=True)

    def train_dataloader(self) -> StatefulDataLoader:
        return StatefulDataLoader(
            self.data, batch_size=16, sampler=DistributedSampler(self.data, seed=0), num_workers=2
        )

    def val_dataloader(self) -> StatefulDataLoader:
        return StatefulDataLoader(self.data, batch_size=16, num_workers=2)

    def on_train_end(self) -> None:
        # What was trained since the last periodic checkpoint is worth keeping too.
        self.trainer.save_checkpoint(DIRECTORY / "final.ckpt")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--accumulation", type=int, default=2)
    arguments = parser.parse_args()

    lightning.seed_everything(0, verbose=False)
    inputs = torch.randn(1280, 16)
    data = TensorDataset(inputs, inputs.square().sum(dim=1, keepdim=True))
    trainer = lightning.Trainer(
        strategy="ddp",
        accelerator="cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        max_steps=arguments.steps,
        accumulate_grad_batches=arguments.accumulation,
        val_check_interval=arguments.save_every * arguments.accumulation,
        check_val_every_n_epoch=None,
        limit_val_batches=4,
        callbacks=[ModelCheckpoint(DIRECTORY, every_n_train_steps=arguments.save_every)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    keepstep.protect(trainer)
    trainer.fit(Regression(data))


if __name__ == "__main__":
    main()

"""A training loop with Hugging Face Accelerate that survives its pod: stop it at any step, start it again, it goes on.

    torchrun --nproc-per-node 2 examples/accelerate_loop.py

`load_state()` finds the newest checkpoint; the loop's own counters are registered, so that they are in it.
"""

import argparse
import os
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed

import keepstep

OUTPUT = Path(os.environ.get("KEEPSTEP_CHECKPOINT_DIRECTORY", "checkpoints"))


class Progress:
    """How far the loop is: optimizer steps, whole epochs, and batches of the one that is begun."""

    def __init__(self) -> None:
        self.step = 0
        self.epoch = 0
        self.batch = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step, "epoch": self.epoch, "batch": self.batch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step, self.epoch, self.batch = state["step"], state["epoch"], state["batch"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save-every", type=int, default=20)
    arguments = parser.parse_args()

    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        gradient_accumulation_steps=2,
        # The order of the data follows from the epoch alone.
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=0),
        project_config=ProjectConfiguration(project_dir=str(OUTPUT), automatic_checkpoint_naming=True, total_limit=3),
    )
    keepstep.protect(accelerator)
    set_seed(0)

    inputs = torch.randn(400, 16)
    targets = inputs.square().sum(dim=1, keepdim=True)
    # With a generator of its own the loader draws nothing from the one that dropout draws from.
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(inputs, targets),
        batch_size=8,
        shuffle=True,
        num_workers=2,
        generator=torch.Generator(),
    )
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Dropout(0.1), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.999**step)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    if any(OUTPUT.glob("**/checkpoint_*")):
        accelerator.load_state()

    while progress.step < arguments.steps:
        loader.set_epoch(progress.epoch)
        batches = accelerator.skip_first_batches(loader, progress.batch) if progress.batch else loader
        for batch, target in batches:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.mse_loss(model(batch), target)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            progress.batch += 1
            if batches.end_of_dataloader:
                progress.epoch, progress.batch = progress.epoch + 1, 0
            if not accelerator.sync_gradients:
                continue
            progress.step += 1
            accelerator.print(f"step={progress.step} loss={loss.item()!r}", flush=True)
            if progress.step % arguments.save_every == 0 or progress.step == arguments.steps:
                accelerator.save_state()
            if progress.step == arguments.steps:
                break
    accelerator.end_training()


if __name__ == "__main__":
    main()

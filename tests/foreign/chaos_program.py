"""A training in one framework that saves every fourth step, and resumes from the newest of its checkpoints.

    chaos_program.py FRAMEWORK OUTPUT

It prints the step that it begins with, and writes its last weights beside OUTPUT. Alone it resumes as such programs do.
"""

import os
import re
import sys
from pathlib import Path
from typing import Any

import torch

STEPS = 12
SAVE_EVERY = 4
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))


def begin(step: int) -> None:
    if RANK == 0:
        # In one write: the ranks share a pipe, and Python's print is several.
        sys.stdout.write(f"begins with step {step}\n")
        sys.stdout.flush()


def end(model: torch.nn.Module, output: Path) -> None:
    torch.save({name: value.clone() for name, value in model.state_dict().items()}, output.parent / f"final{RANK}.pt")


def newest(output: Path) -> Path | None:
    """The newest checkpoint by its name, as most programs look for it."""
    found = [path for path in output.glob("*") if re.search(r"\d+", path.name)]
    return max(found, key=lambda path: int(re.findall(r"\d+", path.name)[-1]), default=None)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.layers(x).square().mean()}


class Rows(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return STEPS * 4

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.full((16,), (index + 1) / 7)}


class SameRows(Rows):
    """For a framework that begins an epoch anew where it resumes in one."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return super().__getitem__(0)


def batch(step: int) -> torch.Tensor:
    return torch.full((4, 16), (step + 1 + RANK) / 7)


def hugging_face(output: Path) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments
    from transformers.trainer_utils import get_last_checkpoint

    class Begins(TrainerCallback):  # type: ignore[misc]  # transformers may not be installed where mypy is
        def on_train_begin(self, arguments: Any, state: Any, control: Any, **_: Any) -> None:
            begin(state.global_step)

    arguments = TrainingArguments(
        str(output),
        max_steps=STEPS,
        save_steps=SAVE_EVERY,
        per_device_train_batch_size=4,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(model=Model(), args=arguments, train_dataset=Rows(), callbacks=[Begins()])
    found = get_last_checkpoint(str(output)) if output.is_dir() else None
    trainer.train(resume_from_checkpoint=found)
    end(trainer.model, output)


def lightning(output: Path) -> None:
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Module(pl.LightningModule):  # type: ignore[misc]  # Lightning may not be installed where mypy is
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()
            self.has_begun = False

        def on_train_start(self) -> None:
            self.has_begun = True
            begin(self.global_step)

        def training_step(self, rows: dict[str, torch.Tensor], _: int) -> torch.Tensor:
            return self.model(**rows)["loss"]  # type: ignore[no-any-return]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    trainer = pl.Trainer(
        accelerator="cpu",
        devices=WORLD_SIZE,
        strategy="ddp" if WORLD_SIZE > 1 else "auto",
        max_steps=STEPS,
        callbacks=[ModelCheckpoint(output, every_n_train_steps=SAVE_EVERY, save_top_k=-1)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module()
    found = newest(output)
    loader = torch.utils.data.DataLoader(SameRows(), batch_size=4)
    trainer.fit(module, loader, ckpt_path=None if found is None else str(found))
    if not module.has_begun:
        # There was nothing left to train.
        begin(trainer.global_step)
    end(module.model, output)


def accelerate(output: Path) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = Model()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    found, step = newest(output), 0
    if found is not None:
        accelerator.load_state(str(found))
        step = int(found.name.removeprefix("step-"))
    begin(step)
    while step < STEPS:
        accelerator.backward(model(batch(step))["loss"])
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % SAVE_EVERY == 0:
            accelerator.save_state(str(output / f"step-{step}"))
    end(model, output)


def dcp(output: Path) -> None:
    import torch.distributed.checkpoint

    if WORLD_SIZE > 1:
        torch.distributed.init_process_group("gloo")
    model = Model()
    wrapped = torch.nn.parallel.DistributedDataParallel(model) if WORLD_SIZE > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def state(step: int) -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": torch.tensor(step)}

    found, step = newest(output), 0
    if found is not None:
        # The optimizer's state has to be there to be loaded into.
        wrapped(batch(0))["loss"].backward()
        optimizer.step()
        loaded = state(0)
        torch.distributed.checkpoint.load(loaded, checkpoint_id=found)
        model.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
        step = int(loaded["step"])
    begin(step)
    while step < STEPS:
        optimizer.zero_grad()
        wrapped(batch(step))["loss"].backward()
        optimizer.step()
        step += 1
        if step % SAVE_EVERY == 0:
            torch.distributed.checkpoint.save(state(step), checkpoint_id=output / f"step-{step}")
    end(model, output)


FRAMEWORKS = {function.__name__: function for function in (hugging_face, lightning, accelerate, dcp)}

if __name__ == "__main__":
    torch.manual_seed(0)
    FRAMEWORKS[sys.argv[1]](Path(sys.argv[2]))
    if torch.distributed.is_initialized():
        # Else one process in some 25 is aborted at its exit, without Keepstep too.
        torch.distributed.destroy_process_group()

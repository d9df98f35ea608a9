"""A training in one framework that looks at what it has just saved, and has files of its own where it saves.

    looking_program.py FRAMEWORK OUTPUT

It prints what it sees. Its numbers are those of steps, so a checkpoint says of which step each part is.
"""

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

STEPS = 4


def see(what: str, value: object) -> None:
    print(f"seen {what}: {value}", flush=True)


def see_folder(folder: Path) -> None:
    """Print the names below a folder, and which of its files are empty."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    see(folder.name, [path.relative_to(folder).as_posix() for path in files])
    see("empty", [path.name for path in files if os.path.getsize(path) == 0])  # noqa: PTH202 - as programs do


class Used:
    """A folder in which a program has a log that is open, samples and arguments."""

    def __init__(self, folder: Path) -> None:
        (folder / "samples").mkdir(parents=True, exist_ok=True)
        (folder / "samples" / "1.png").write_text("a picture")
        (folder / "args.json").write_text("{}")
        self._folder = folder
        self._log = (folder / "train.log").open("a")

    def step(self, step: int) -> None:
        print("step", step, file=self._log, flush=True)
        (self._folder / "state.json").write_text(json.dumps({"step": step}))


class Rows(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.ones(8), "labels": torch.zeros(1)}


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        return {"loss": self.layer(x).square().mean()}


def accelerate(output: Path) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = Model()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    used = Used(output)
    for step in range(1, STEPS + 1):
        accelerator.backward(model(torch.ones(2, 8))["loss"])
        optimizer.step()
        with torch.no_grad():
            model.layer.bias.fill_(float(step))
        used.step(step)
        accelerator.save_state(str(output))
        see_folder(output)
        with safe_open(output / "model.safetensors", "pt") as file:
            see("bias", file.get_tensor("layer.bias").item())
        save_file({"ema": torch.full((4,), float(step))}, output / "ema.safetensors")
        accelerator.load_state(str(output))
        see("loaded bias", model.layer.bias.item())
        see("loaded step", next(iter(optimizer.state_dict()["state"].values()))["step"].item())
        accelerator.save_state(str(output / "tmp"))
        (output / "tmp").rename(output / f"step-{step}")
        see_folder(output / f"step-{step}")


def deepspeed(output: Path) -> None:
    import deepspeed

    # DeepSpeed would compile it at the first start, for a minute.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    os.environ["LOCAL_RANK"] = "0"
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    model = Model()
    config = {"train_micro_batch_size_per_gpu": 2, "zero_allow_untested_optimizer": True}
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config)
    tag = output / "last"
    used = Used(tag)
    for step in range(1, STEPS + 1):
        engine.backward(engine(torch.ones(2, 8))["loss"])
        engine.step()
        used.step(step)
        engine.save_checkpoint(str(output), "last", {"step": step})
        see_folder(output)
        save_file({"ema": torch.full((4,), float(step))}, tag / "ema.safetensors")
        see("ema", load_file(tag / "ema.safetensors")["ema"][0].item())
        see("loaded step", engine.load_checkpoint(str(output), "last")[1]["step"])


def hugging_face(output: Path) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Looks(TrainerCallback):  # type: ignore[misc]  # transformers may not be installed where mypy is
        def on_save(self, arguments: Any, state: Any, control: Any, **_: Any) -> None:
            folder = output / f"checkpoint-{state.global_step}"
            see_folder(folder)
            see("step", json.loads((folder / "trainer_state.json").read_text())["global_step"])
            torch.save({"step": state.global_step}, folder / "ema.pt")
            see("folders", sorted(path.name for path in output.glob("checkpoint-*")))

    used = Used(output / "checkpoint-2")
    used.step(0)
    arguments = TrainingArguments(
        str(output), max_steps=STEPS, save_steps=1, save_total_limit=2, report_to=[], use_cpu=True, disable_tqdm=True
    )
    Trainer(model=Model(), args=arguments, train_dataset=Rows(), callbacks=[Looks()]).train()
    see("threads", sorted(thread.name for thread in threading.enumerate()))
    see_folder(output)


def lightning(output: Path) -> None:
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import Callback, ModelCheckpoint

    class Module(pl.LightningModule):  # type: ignore[misc]  # Lightning may not be installed where mypy is
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()

        def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
            return self.model(**batch)["loss"]  # type: ignore[no-any-return]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    class Looks(Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
            see_folder(output)
            see("best", Path(trainer.checkpoint_callback.best_model_path).name)
            trainer.save_checkpoint(output / "mine.ckpt")
            see("mine", torch.load(output / "mine.ckpt", weights_only=False)["global_step"])

    used = Used(output)
    used.step(0)
    checkpoint = ModelCheckpoint(
        output, every_n_train_steps=1, save_last=True, save_top_k=2, monitor="step", mode="max"
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=STEPS,
        callbacks=[checkpoint, Looks()],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(Rows(), batch_size=4))
    see("variables", [name for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK") if name in os.environ])
    see("threads", sorted(thread.name for thread in threading.enumerate()))
    see("checkpoint path", trainer.ckpt_path)
    see_folder(output)


def dcp(output: Path) -> None:
    import torch.distributed.checkpoint

    state = {"weight": torch.zeros(8)}
    for step in range(1, STEPS + 1):
        state["weight"] += 1
        folder = output / f"step-{step}"
        torch.distributed.checkpoint.save(state, checkpoint_id=folder)
        torch.save({"step": step}, folder / "meta.pt")
        see_folder(folder)


FRAMEWORKS = {function.__name__: function for function in (accelerate, deepspeed, hugging_face, lightning, dcp)}

if __name__ == "__main__":
    torch.manual_seed(0)
    FRAMEWORKS[sys.argv[1]](Path(sys.argv[2]))

"""Several trainings one after the other in one framework, as stages, folds and sweeps are.

    several_trainings.py FRAMEWORK OUTPUT NAME…

Each trains STEPS steps on data of its own in OUTPUT/NAME, and prints what it has learned. KILLED_AT=NAME:STEP has this
process killed there, and STOPPED_AT=NAME:STEP told to end, once; with NO_ROOM=1 no checkpoint can be written from then
on. WISH=last: it asks for its last checkpoint, as many scripts do. WISH=weights: its periodic checkpoints have the
weights alone. WISH=nameless: its framework gets no output directory, and a path for each save.
"""

import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

STEPS = 6
EVERY = int(os.environ.get("EVERY", "2"))
WISH = os.environ.get("WISH", "")


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        output = self.layer(x)
        return {"loss": (output - labels).square().mean(), "logits": output}


class Rows(torch.utils.data.Dataset[Any]):
    """Differ from training to training."""

    def __init__(self, name: str) -> None:
        self._label = float(sum(name.encode()))
        self._inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(int(self._label)))

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": self._inputs[index], "labels": torch.full((1,), self._label)}


def ends_at(name: str, training: int) -> Callable[[int], None]:
    """Return what a training calls after each step."""

    def stepped(step: int) -> None:
        for variable, number in (("KILLED_AT", signal.SIGKILL), ("STOPPED_AT", signal.SIGTERM)):
            done = Path(os.environ.get("ENDS", "/nowhere")) / variable
            is_now = os.environ.get(variable) == f"{name}:{training}:{step}" and os.environ.get("RANK", "0") == "0"
            if is_now and not done.exists():
                done.touch()
                if "NO_ROOM" in os.environ:
                    # Enough for what is no checkpoint.
                    resource.setrlimit(resource.RLIMIT_FSIZE, (500, resource.RLIM_INFINITY))
                os.kill(os.getpid(), number)

    return stepped


def hugging_face(output: Path, name: str, stepped: Callable[[int], None]) -> Model:
    from transformers import Trainer, TrainerCallback, TrainingArguments
    from transformers.trainer_utils import get_last_checkpoint

    class Ends(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            stepped(state.global_step)

    model = Model()
    settings = TrainingArguments(
        str(output / name),
        max_steps=STEPS,
        save_steps=EVERY,
        save_only_model=WISH == "weights",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    last = get_last_checkpoint(output / name) if WISH == "last" and (output / name).is_dir() else None
    Trainer(model, settings, train_dataset=Rows(name), callbacks=[Ends()]).train(resume_from_checkpoint=last)
    return model


def lightning(output: Path, name: str, stepped: Callable[[int], None]) -> Model:
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            return self.model(**batch)["loss"]  # type: ignore[no-any-return]

        def on_train_batch_end(self, *_: Any) -> None:
            stepped(self.trainer.global_step)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.1)

    module = Module()
    loader: Any = torch.utils.data.DataLoader(Rows(name), batch_size=2)
    devices = int(os.environ.get("WORLD_SIZE", "1"))
    pl.Trainer(
        max_steps=STEPS,
        accelerator="cpu",
        devices=devices,
        strategy="ddp" if devices > 1 else "auto",
        logger=False,
        callbacks=[ModelCheckpoint(output / name, every_n_train_steps=EVERY, save_top_k=-1, save_last=WISH == "last")],
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(module, loader, ckpt_path="last" if WISH == "last" else None)
    return module.model


def accelerate(output: Path, name: str, stepped: Callable[[int], None]) -> Model:
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    project = ProjectConfiguration(project_dir=str(output / name), automatic_checkpoint_naming=WISH != "nameless")
    accelerator = Accelerator(cpu=True, project_config=project)
    model = Model()
    loader: Any = torch.utils.data.DataLoader(Rows(name), batch_size=2)
    trained, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1), loader)
    steps = Steps()
    accelerator.register_for_checkpointing(steps)
    if "KEEPSTEP_VOLUME" in os.environ:
        # Without a checkpoint, Accelerate itself raises.
        try:
            accelerator.load_state()
        except (FileNotFoundError, ValueError):
            print("nothing to load", flush=True)
    for batch in accelerator.skip_first_batches(loader, steps.done):
        if steps.done == STEPS:
            break
        accelerator.backward(trained(**batch)["loss"])
        optimizer.step()
        optimizer.zero_grad()
        steps.done += 1
        stepped(steps.done)
        if steps.done % EVERY == 0:
            accelerator.save_state(str(output / name / f"step_{steps.done}") if WISH == "nameless" else None)
    if "RANK" not in os.environ:
        # It ends the process group, which the next training needs.
        accelerator.end_training()
    return model


def deepspeed(output: Path, name: str, stepped: Callable[[int], None]) -> Model:
    import deepspeed as library

    # Without it DeepSpeed would compile for a minute.
    library.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    model, data = Model(), Rows(name)
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    engine, *_ = library.initialize(model=model, optimizer=optimizer, config=settings)
    engine.load_checkpoint(str(output / name))
    while (step := engine.global_steps) < STEPS:
        rows = [data[2 * step], data[2 * step + 1]]
        batch = {key: torch.stack([row[key] for row in rows]) for key in ("x", "labels")}
        engine.backward(engine(**batch)["loss"])
        engine.step()
        stepped(engine.global_steps)
        if engine.global_steps % EVERY == 0:
            engine.save_checkpoint(str(output / name))
    return model


class Steps:
    done = 0

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.done = state["done"]


def checkpointer(output: Path, name: str, stepped: Callable[[int], None]) -> Model:
    import keepstep

    model, step = Model(), 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    kept = keepstep.Checkpointer(name=name, asynchronous=False)
    if (found := kept.resume()) is not None:
        state = torch.load(found / "state.pt")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    data = Rows(name)
    while step < STEPS and not kept.stopping:
        rows = [data[2 * step], data[2 * step + 1]]
        model(*(torch.stack([row[key] for row in rows]) for key in ("x", "labels")))["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        stepped(step)
        if kept.should_save(step, every=EVERY):
            with kept.save(step, kind="final" if step == STEPS else None) as directory:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                torch.save(state, directory / "state.pt")
    kept.finish()
    return model


if __name__ == "__main__":
    framework, output, *trainings = sys.argv[1:]
    for number, one in enumerate(trainings):
        torch.manual_seed(0)
        learned = globals()[framework](Path(output), one, ends_at(one, number))
        if os.environ.get("RANK", "0") == "0":
            weights = torch.cat([value.detach().flatten() for value in learned.parameters()]).tolist()
            print(f"learned {one}: {weights}", flush=True)
    if "RANK" in os.environ:
        # Two ranks sometimes abort as the interpreter ends, also without Keepstep.
        os._exit(0)

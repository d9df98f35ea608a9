"""A training of 1 GiB of state in one framework, which prints as JSON how long each step and each save held it up.

    program.py FRAMEWORK DIRECTORY STEPS SAVE_EVERY [--keepstep] [--device cuda] [--layers N] [--stop-at STEP]

The frameworks get the same model and the same steps, TRL a language model of the same size. A save is what the
framework's own method for it takes; "plain" has no framework. With more ranks, rank 0 prints. With `--stop-at`, SIGTERM
comes in that step, and the time of it is all that is printed.
"""

import argparse
import json
import os
import resource
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

LAYERS: Final = 21
SIDE: Final = 2048
"""21 layers of 2048 x 2048: with the two moments of AdamW they have 1 GiB of fp32."""
ROWS: Final = 256
RANKS: Final = int(os.environ.get("WORLD_SIZE", "1"))


class Model(torch.nn.Module):
    def __init__(self, layers: int = LAYERS, side: int = SIDE) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(side, side) for _ in range(layers))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = x + layer(x).relu()
        return {"loss": x.float().pow(2).mean()}


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 100_000 * ROWS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.full((SIDE,), (index % 7) / 7), "labels": torch.zeros(1)}


class Clock:
    """How long saves took, when steps ended, and during which of them a checkpoint was being written."""

    def __init__(self, stop_at: int) -> None:
        self.stop_at = stop_at
        self.saves: list[float] = []
        self.steps: list[float] = []
        self.in_flight: list[bool] = []

    def timed(self, save: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **keywords: Any) -> Any:
            began_at = time.perf_counter()
            try:
                return save(*arguments, **keywords)
            finally:
                self.saves.append(time.perf_counter() - began_at)

        return timed

    def stepped(self) -> None:
        from keepstep.framework_run import FrameworkRun

        self.steps.append(time.perf_counter())
        run = FrameworkRun._current
        self.in_flight.append(run is not None and bool(run._behind))
        if len(self.steps) == self.stop_at:
            print(json.dumps({"stopped_at": time.time()}), flush=True)
            os.kill(os.getpid(), signal.SIGTERM)


def hugging_face(options: argparse.Namespace, clock: Clock) -> None:
    import transformers

    arguments = transformers.TrainingArguments(**_trainer_arguments(options), per_device_train_batch_size=ROWS)
    trainer = transformers.Trainer(model=Model(options.layers), args=arguments, train_dataset=Rows())
    _train_trainer(trainer, options, clock)


def trl(options: argparse.Namespace, clock: Clock) -> None:
    import tokenizers
    import transformers
    import trl
    from datasets import Dataset

    words = {"<eos>": 0, "<unk>": 1} | {f"w{number}": number for number in range(2, 64)}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>")),
        eos_token="<eos>",
        pad_token="<eos>",
    )
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=1024, intermediate_size=2816, num_hidden_layers=7, num_attention_heads=8
    )
    rows = Dataset.from_dict({"input_ids": [[(row + place) % 64 for place in range(32)] for row in range(20_000)]})
    trainer = trl.SFTTrainer(
        model=transformers.LlamaForCausalLM(config),
        args=trl.SFTConfig(**_trainer_arguments(options), per_device_train_batch_size=4, bf16=False),
        train_dataset=rows,
        processing_class=tokenizer,
    )
    _train_trainer(trainer, options, clock)


def _trainer_arguments(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "output_dir": str(options.directory / "out"),
        "use_cpu": options.device == "cpu",
        "dataloader_pin_memory": options.device != "cpu",
        "max_steps": options.steps,
        "save_steps": options.save_every or 1,
        "save_strategy": "steps" if options.save_every else "no",
        "save_total_limit": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "logging_steps": 10_000,
    }


def _train_trainer(trainer: Any, options: argparse.Namespace, clock: Clock) -> None:
    training_step = trainer.training_step

    def stepped(*arguments: Any, **keywords: Any) -> Any:
        # Not by a callback, which might look at checkpoints: training would wait for them.
        clock.stepped()
        return training_step(*arguments, **keywords)

    trainer.training_step = stepped
    _protect(trainer, options)
    trainer._save_checkpoint = clock.timed(trainer._save_checkpoint)
    trainer.train()


def lightning(options: argparse.Namespace, clock: Clock) -> None:
    import lightning.pytorch as lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Module(lightning.LightningModule):  # type: ignore[misc]  # may not be installed where mypy is
        def __init__(self) -> None:
            super().__init__()
            self.model = Model(options.layers)

        def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
            return self.model(**batch)["loss"]  # type: ignore[no-any-return]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

        def on_train_batch_end(self, *_: Any) -> None:
            clock.stepped()

    checkpoint = ModelCheckpoint(options.directory / "out", every_n_train_steps=options.save_every or options.steps + 1)
    trainer = lightning.Trainer(
        accelerator="cpu" if options.device == "cpu" else "gpu",
        devices=RANKS,
        strategy="ddp" if RANKS > 1 else "auto",
        max_steps=options.steps,
        callbacks=[checkpoint],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    _protect(trainer, options)
    after_batch, saving_after_batch = checkpoint.on_train_batch_end, clock.timed(checkpoint.on_train_batch_end)

    def timed(*arguments: Any, **keywords: Any) -> None:
        is_due = options.save_every and trainer.global_step % options.save_every == 0
        (saving_after_batch if is_due else after_batch)(*arguments, **keywords)

    checkpoint.on_train_batch_end = timed
    trainer.fit(Module(), torch.utils.data.DataLoader(Rows(), batch_size=ROWS))


def deepspeed(options: argparse.Namespace, clock: Clock) -> None:
    import deepspeed

    # DeepSpeed would compile it at the first start, for a minute.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
    }
    model = Model()
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config)
    _protect(engine, options)
    save = clock.timed(engine.save_checkpoint)
    for step, batch in enumerate(torch.utils.data.DataLoader(Rows(), batch_size=ROWS), 1):
        engine.backward(engine(**batch)["loss"])
        engine.step()
        clock.stepped()
        if options.save_every and step % options.save_every == 0:
            save(str(options.directory / "out"), tag=f"step-{step}")
            if os.environ.get("RANK", "0") == "0":
                shutil.rmtree(options.directory / "out" / f"step-{step - options.save_every}", ignore_errors=True)
        if step == options.steps:
            break
    engine.destroy()


def accelerate(options: argparse.Namespace, clock: Clock) -> None:
    import accelerate

    accelerator = accelerate.Accelerator(cpu=options.device == "cpu")
    _protect(accelerator, options)
    model = Model(options.layers)
    optimizer = torch.optim.AdamW(model.parameters())
    loader = torch.utils.data.DataLoader(Rows(), batch_size=ROWS)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    save = clock.timed(accelerator.save_state)
    for step, batch in enumerate(loader, 1):
        optimizer.zero_grad()
        accelerator.backward(model(**batch)["loss"])
        optimizer.step()
        clock.stepped()
        if options.save_every and step % options.save_every == 0:
            save(str(options.directory / "out" / f"step-{step}"))
            if accelerator.is_main_process:
                shutil.rmtree(options.directory / "out" / f"step-{step - options.save_every}", ignore_errors=True)
        if step == options.steps:
            break
    accelerator.end_training()


def plain(options: argparse.Namespace, clock: Clock) -> None:
    import keepstep

    model = Model(options.layers).to(options.device)
    optimizer = torch.optim.AdamW(model.parameters())
    inputs = torch.ones(ROWS, SIDE, device=options.device)
    checkpointer = keepstep.Checkpointer(options.directory) if options.keepstep else None

    def save(step: int) -> None:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        if checkpointer is None:
            torch.save(state, options.directory / "state.pt")
            return
        with checkpointer.save(step) as folder:
            torch.save(state, folder / "state.pt")

    timed = clock.timed(save)
    for step in range(1, options.steps + 1):
        optimizer.zero_grad()
        model(inputs)["loss"].backward()
        optimizer.step()
        clock.stepped()
        if (options.save_every and step % options.save_every == 0) or (
            checkpointer is not None and checkpointer.should_save(step, every=0)
        ):
            timed(step)
        if checkpointer is not None and checkpointer.stopping:
            break
    if checkpointer is not None:
        checkpointer.finish()


def _protect(trainer: Any, options: argparse.Namespace) -> None:
    if options.keepstep:
        import keepstep

        # By default Accelerate and DeepSpeed wait.
        keepstep.protect(trainer, asynchronous=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("framework", choices=FRAMEWORKS)
    parser.add_argument("directory", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("save_every", type=int)
    parser.add_argument("--keepstep", action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--stop-at", type=int, default=-1)
    options = parser.parse_args()
    torch.manual_seed(7)
    clock = Clock(options.stop_at)
    FRAMEWORKS[options.framework](options, clock)
    ended_at = time.perf_counter()
    measured = {
        "saves": clock.saves,
        "steps": clock.steps,
        "in_flight": clock.in_flight,
        "seconds": ended_at - clock.steps[0],
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(measured))


FRAMEWORKS: Final = {
    "hugging-face": hugging_face,
    "trl": trl,
    "lightning": lightning,
    "accelerate": accelerate,
    "deepspeed": deepspeed,
    "plain": plain,
}

if __name__ == "__main__":
    main()

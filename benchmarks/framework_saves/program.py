"""A training of 1 GiB of state in one framework, which prints as JSON how long each step and each save held it up.

    program.py FRAMEWORK DIRECTORY STEPS SAVE_EVERY [--mooring]

The frameworks get the same model and the same steps. A save is what the framework's own method for it takes.
"""

import argparse
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

LAYERS: Final = 21
SIDE: Final = 2048
"""21 layers of 2048 x 2048: with the two moments of AdamW they have 1 GiB of fp32."""
ROWS: Final = 64


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(SIDE, SIDE) for _ in range(LAYERS))

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
    """How long saves took, and when steps ended."""

    def __init__(self) -> None:
        self.saves: list[float] = []
        self.steps: list[float] = []

    def timed(self, save: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **keywords: Any) -> Any:
            began_at = time.perf_counter()
            try:
                return save(*arguments, **keywords)
            finally:
                self.saves.append(time.perf_counter() - began_at)

        return timed

    def stepped(self) -> None:
        self.steps.append(time.perf_counter())


def hugging_face(options: argparse.Namespace, clock: Clock) -> None:
    import transformers

    class Stepped(transformers.TrainerCallback):  # type: ignore[misc]  # may not be installed where mypy is
        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.stepped()

    arguments = transformers.TrainingArguments(
        output_dir=str(options.directory / "out"),
        use_cpu=True,
        max_steps=options.steps,
        per_device_train_batch_size=ROWS,
        save_steps=options.save_every,
        save_strategy="steps" if options.save_every else "no",
        save_total_limit=1,
        report_to="none",
        disable_tqdm=True,
        logging_steps=10_000,
    )
    trainer = transformers.Trainer(model=Model(), args=arguments, train_dataset=Rows(), callbacks=[Stepped()])
    if options.mooring:
        import mooring

        mooring.protect(trainer)
    trainer._save_checkpoint = clock.timed(trainer._save_checkpoint)
    trainer.train()


def accelerate(options: argparse.Namespace, clock: Clock) -> None:
    import accelerate

    accelerator = accelerate.Accelerator(cpu=True)
    if options.mooring:
        import mooring

        mooring.protect(accelerator)
    model = Model()
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
            shutil.rmtree(options.directory / "out" / f"step-{step - options.save_every}", ignore_errors=True)
        if step == options.steps:
            break
    accelerator.end_training()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("framework", choices=FRAMEWORKS)
    parser.add_argument("directory", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("save_every", type=int)
    parser.add_argument("--mooring", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(7)
    clock = Clock()
    FRAMEWORKS[options.framework](options, clock)
    ended_at = time.perf_counter()
    print(json.dumps({"saves": clock.saves, "steps": clock.steps, "seconds": ended_at - clock.steps[0]}))


FRAMEWORKS: Final = {"hugging-face": hugging_face, "accelerate": accelerate}

if __name__ == "__main__":
    main()

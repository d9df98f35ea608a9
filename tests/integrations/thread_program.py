"""A training in another thread than the main one, to which SIGTERM is sent in step 3 of its first life.

    thread_program.py FRAMEWORK MAIN OUTPUT

It prints the step that it begins with, and "trained" when all is done. MAIN: the main thread "waits" for what the other
returns, "looks" whether it is there, or "ends".
"""

import itertools
import os
import queue
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.integrations.looking_program import Model, Rows

STEPS = 500
"""By then the main thread, whichever it is that takes the signal, has had its turn."""


def at_step(step: int, output: Path) -> None:
    stopped = output.parent / "stopped"
    if step == 3 and not stopped.exists():
        stopped.touch()
        os.kill(os.getpid(), signal.SIGTERM)


def begin(step: int) -> None:
    print("begins with step", step, flush=True)


def accelerate(output: Path) -> None:
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    project = ProjectConfiguration(project_dir=str(output.parent), automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=project)
    model = Model()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    loader = accelerator.prepare(torch.utils.data.DataLoader(Rows(), batch_size=4))
    model.train()
    step = 0
    if any(output.glob("checkpoint_*")):
        accelerator.load_state()
        step = steps_of(optimizer)
    begin(step)
    for _, batch in zip(range(STEPS - step), itertools.cycle(loader), strict=False):
        accelerator.backward(model(**batch)["loss"])
        optimizer.step()
        optimizer.zero_grad()
        at_step(steps_of(optimizer), output)


def steps_of(optimizer: torch.optim.Optimizer) -> int:
    return int(next(iter(optimizer.state_dict()["state"].values()))["step"])


def checkpointer(output: Path) -> None:
    import keepstep

    saver = keepstep.Checkpointer()
    found = saver.resume()
    step = 0 if found is None else torch.load(found / "state.pt")["step"]
    begin(step)
    while step < STEPS and not saver.stopping:
        step += 1
        # As long as a step is.
        torch.randn(512, 512) @ torch.randn(512, 512)
        at_step(step, output)
        if saver.should_save(step, every=2):
            with saver.save(step) as folder:
                torch.save({"step": step}, folder / "state.pt")
    saver.finish()


def hugging_face(output: Path) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Stopped(TrainerCallback):  # type: ignore[misc]  # transformers may not be installed where mypy is
        def on_train_begin(self, arguments: Any, state: Any, control: Any, **_: Any) -> None:
            begin(state.global_step)

        def on_step_end(self, arguments: Any, state: Any, control: Any, **_: Any) -> None:
            at_step(state.global_step, output)

    arguments = TrainingArguments(
        str(output), max_steps=STEPS, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True
    )
    Trainer(model=Model(), args=arguments, train_dataset=Rows(), callbacks=[Stopped()]).train()


def lightning(output: Path) -> None:
    import lightning.pytorch as pl

    class Module(pl.LightningModule):  # type: ignore[misc]  # Lightning may not be installed where mypy is
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()

        def on_train_start(self) -> None:
            begin(self.global_step)

        def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
            at_step(self.global_step + 1, output)
            return self.model(**batch)["loss"]  # type: ignore[no-any-return]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    trainer = pl.Trainer(
        accelerator="cpu", max_steps=STEPS, logger=False, enable_progress_bar=False, enable_model_summary=False
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(Rows(), batch_size=4))


FRAMEWORKS = {function.__name__: function for function in (accelerate, checkpointer, hugging_face, lightning)}

if __name__ == "__main__":
    torch.manual_seed(0)
    results: queue.Queue[str] = queue.Queue()

    def train() -> None:
        FRAMEWORKS[sys.argv[1]](Path(sys.argv[3]))
        print("trained", flush=True)
        results.put("trained")

    threading.Thread(target=train).start()
    if sys.argv[2] == "waits":
        results.get()
    while sys.argv[2] == "looks" and results.empty():
        time.sleep(0.1)

"""A training that ends with its best model, which is the one of step 2.

    best_model.py FRAMEWORK OUTPUT

KILLED_AT is the step after which it is killed, once.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from tests.integrations.several_trainings import Model, Rows

STEPS = 8


def stepped(step: int) -> None:
    done = Path(os.environ.get("ENDS", "/nowhere")) / "killed"
    if os.environ.get("KILLED_AT") == str(step) and not done.exists():
        done.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def hugging_face(output: Path) -> Model:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Ends(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            stepped(state.global_step)

    model = Model()
    settings = TrainingArguments(
        str(output),
        max_steps=STEPS,
        save_steps=2,
        eval_steps=2,
        eval_strategy="steps",
        load_best_model_at_end=True,
        metric_for_best_model="worse",
        greater_is_better=False,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer: Any = None
    trainer = Trainer(
        model,
        settings,
        train_dataset=Rows("train"),
        eval_dataset=Rows("eval"),
        compute_metrics=lambda _: {"worse": float(trainer.state.global_step)},
        callbacks=[Ends()],
    )
    trainer.train()
    print("best", Path(trainer.state.best_model_checkpoint).name, flush=True)
    return model


def lightning(output: Path) -> Model:
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            self.log("worse", float(self.global_step))
            return self.model(**batch)["loss"]  # type: ignore[no-any-return]

        def test_step(self, batch: Any, index: int) -> None:
            self.log("loss", self.model(**batch)["loss"])

        def on_train_batch_end(self, *_: Any) -> None:
            stepped(self.trainer.global_step)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.1)

    module = Module()
    best = ModelCheckpoint(output, every_n_train_steps=2, monitor="worse", mode="min", save_top_k=2)
    newest = ModelCheckpoint(output / "newest", every_n_train_steps=2)
    trainer = pl.Trainer(
        max_steps=STEPS,
        accelerator="cpu",
        logger=False,
        callbacks=[best, newest],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, torch.utils.data.DataLoader(Rows("train"), batch_size=2))
    print("best", Path(best.best_model_path).name, flush=True)
    trainer.test(module, torch.utils.data.DataLoader(Rows("test"), batch_size=2), ckpt_path="best")
    return module.model


if __name__ == "__main__":
    framework, place = sys.argv[1:]
    torch.manual_seed(0)
    learned = globals()[framework](Path(place))
    print("learned", torch.cat([value.detach().flatten() for value in learned.parameters()]).tolist(), flush=True)

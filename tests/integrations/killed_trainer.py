"""A Trainer of Hugging Face that goes on from its newest checkpoint by its own rules, as transformers' examples do.

    killed_trainer.py OUTPUT [MOMENT]

With a moment it is protected by Keepstep and killed then; without, it knows nothing of Keepstep. Prints the step that
it began after, and the loss of each step.
"""

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch
import transformers
from transformers.trainer_utils import get_last_checkpoint

STEPS: Final = 10
SAVE_STEPS: Final = 4
NOTICE_STEP: Final = 6


class Counting:
    """Sequences that count upwards."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = (index + torch.arange(8)) % 32
        return {"input_ids": tokens, "labels": tokens}


class At(transformers.TrainerCallback):  # type: ignore[misc]  # transformers may not be installed where mypy is
    def __init__(self, event: str, step: int, what: Callable[[], object]) -> None:
        self._step, self._what = step, what
        setattr(self, event, self._on_event)

    def _on_event(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self._step:
            self._what()


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def notice() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def event(name: str, step: int) -> Callable[[Any], None]:
    """When the Trainer tells its callbacks of it: what it saved before is in place."""
    return lambda trainer: trainer.add_callback(At(name, step, kill))


def told_and_then(stop: Callable[[Any], None]) -> Callable[[Any], None]:
    def prepare(trainer: Any) -> None:
        trainer.add_callback(At("on_step_end", NOTICE_STEP, notice))
        stop(trainer)

    return prepare


def writing(method: str) -> Callable[[Any], None]:
    """In the just-in-time save, when this method of the Trainer has written its files."""

    def prepare(trainer: Any) -> None:
        write = getattr(trainer, method)

        def write_and_die(*arguments: Any, **keywords: Any) -> None:
            write(*arguments, **keywords)
            if trainer.state.global_step == NOTICE_STEP:
                kill()

        setattr(trainer, method, write_and_die)

    return prepare


MOMENTS: Final[Mapping[str, Callable[[Any], None]]] = MappingProxyType(
    {
        "before the first step": event("on_train_begin", 0),
        "before the first save": event("on_step_end", 2),
        "between saves": event("on_step_end", 6),
        "in an evaluation": event("on_prediction_step", 8),
        "after a periodic save": event("on_save", 8),
        "after the model of the just-in-time save": told_and_then(writing("save_model")),
        "after the optimizer of the just-in-time save": told_and_then(writing("_save_optimizer_and_scheduler")),
        "before the just-in-time save is announced": told_and_then(event("on_save", NOTICE_STEP)),
        "at the end of the just-in-time save": told_and_then(event("on_train_end", NOTICE_STEP)),
    }
)


def main() -> None:
    output, *moment = sys.argv[1:]
    transformers.set_seed(7)
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        attention_dropout=0.2,
    )
    arguments = transformers.TrainingArguments(
        output_dir=output,
        use_cpu=True,
        max_steps=STEPS,
        per_device_train_batch_size=4,
        logging_steps=1,
        save_steps=SAVE_STEPS,
        eval_strategy="steps",
        eval_steps=SAVE_STEPS,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(
        model=transformers.LlamaForCausalLM(config), args=arguments, train_dataset=Counting(), eval_dataset=Counting()
    )
    if moment:
        from keepstep import protect

        protect(trainer)
        MOMENTS[moment[0]](trainer)
    last = get_last_checkpoint(output) if Path(output).is_dir() else None
    trainer.train(resume_from_checkpoint=last)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print(json.dumps({"after": int(last.rpartition("-")[2]) if last else 0, "losses": losses}))


if __name__ == "__main__":
    main()

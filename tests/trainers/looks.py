"""Makes a trainer look at what it has saved, add to it, and load it again, as programs do in code of their own.

A trainer that finds something else than it has saved ends with an error.
"""

import functools
import json
from pathlib import Path
from typing import Any

import torch

import keepstep


def install() -> None:
    """Wrap `torch.save`, and have every trainer that is protected from now on look."""
    save, protect = torch.save, keepstep.protect

    @functools.wraps(save)
    def save_and_say(value: Any, file: Any, *arguments: Any, **keywords: Any) -> Any:
        where = Path(file).name if isinstance(file, str | Path) else type(file).__name__
        result = save(value, file, *arguments, **keywords)
        print("saved", where, flush=True)
        return result

    def protect_and_look(trainer: Any, **options: Any) -> Any:
        result = protect(trainer, **options)
        name = type(trainer).__name__
        if name == "Accelerator":
            load_after(trainer, "save_state", lambda _, path: trainer.load_state(str(path)))
        elif name == "DeepSpeedEngine":
            load_after(trainer, "save_checkpoint", lambda folder, _: trainer.load_checkpoint(folder))
        elif hasattr(trainer, "add_callback"):
            trainer.add_callback(callback_of_transformers())
        else:
            trainer.callbacks.append(callback_of_lightning())
        return result

    torch.save, keepstep.protect = save_and_say, protect_and_look  # type: ignore[assignment]


def load_after(trainer: Any, name: str, load: Any) -> None:
    save = getattr(trainer, name)

    def save_and_load(*arguments: Any, **keywords: Any) -> Any:
        saved = save(*arguments, **keywords)
        load(arguments[0] if arguments else None, saved)
        print("looked", flush=True)
        return saved

    setattr(trainer, name, save_and_load)


def callback_of_transformers() -> Any:
    from transformers import TrainerCallback

    class Looks(TrainerCallback):  # type: ignore[misc]  # transformers may not be installed where mypy is
        def on_save(self, arguments: Any, state: Any, control: Any, **_: Any) -> None:
            folder = Path(arguments.output_dir) / f"checkpoint-{state.global_step}"
            if state.is_world_process_zero:
                found = json.loads((folder / "trainer_state.json").read_text())
                assert found["global_step"] == state.global_step
                torch.save({"step": state.global_step}, folder / "ema.pt")
                print("looked", flush=True)

    return Looks()


def callback_of_lightning() -> Any:
    from lightning.pytorch import Callback

    class Looks(Callback):  # type: ignore[misc]  # Lightning may not be installed where mypy is
        def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
            best = trainer.checkpoint_callback.best_model_path
            if best and trainer.is_global_zero:
                assert torch.load(best, weights_only=False)["global_step"] <= trainer.global_step
                print("looked", flush=True)

    return Looks()

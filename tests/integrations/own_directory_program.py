"""A training that looks for its newest checkpoint itself, in a directory of its own, and loads it by its name.

    own_directory_program.py FRAMEWORK OUTPUT

In the first start of a directory it sends itself SIGTERM after step 4.
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

EVERY, TOLD_AT, STEPS = 3, 4, 8


def newest(output: Path) -> Path | None:
    """The one with the highest step; names end with it."""
    return max(output.glob("step_*"), key=lambda path: int(path.name[5:]), default=None)


def trained(step: int, begun_at: int, save: Callable[[], object]) -> None:
    print("step", step, flush=True)
    if step == TOLD_AT and not begun_at:
        os.kill(os.getpid(), signal.SIGTERM)
    if step % EVERY == 0:
        save()


def accelerate(output: Path) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(4, 1)
    loader: Any = torch.utils.data.DataLoader(torch.randn(STEPS * 2, 4), batch_size=2)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)
    begun_at = 0
    if (found := newest(output)) is not None:
        accelerator.load_state(str(found))
        begun_at = int(found.name[5:])
    print("begins at", begun_at, flush=True)
    for step, batch in enumerate(accelerator.skip_first_batches(loader, begun_at), begun_at + 1):
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        trained(step, begun_at, lambda: accelerator.save_state(str(output / f"step_{step}")))  # noqa: B023 - called now


def deepspeed(output: Path) -> None:
    import deepspeed as library

    # Without it DeepSpeed would compile for a minute.
    library.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    model = torch.nn.Linear(4, 1)
    settings = {"train_micro_batch_size_per_gpu": 2, "zero_allow_untested_optimizer": True}
    engine, *_ = library.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=settings)
    if (found := newest(output)) is not None:
        engine.load_checkpoint(str(output), found.name)
    begun_at = engine.global_steps
    print("begins at", begun_at, flush=True)
    while engine.global_steps < STEPS:
        engine.backward(engine(torch.randn(2, 4)).square().mean())
        engine.step()
        step = engine.global_steps
        trained(step, begun_at, lambda: engine.save_checkpoint(str(output), f"step_{step}"))  # noqa: B023 - called now


if __name__ == "__main__":
    {"accelerate": accelerate, "deepspeed": deepspeed}[sys.argv[1]](Path(sys.argv[2]))

"""A small ZeRO-3 training under Accelerate in one process; it tells itself to end during the evaluation of a step.

`evaluate_at`: after which step it evaluates, and sends itself SIGTERM in there.
"""

import argparse
import os
import signal
from typing import Any

import deepspeed
import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, ProjectConfiguration, set_seed

import keepstep

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 1,
    "zero_optimization": {"stage": 3},
    "zero_allow_untested_optimizer": True,
}

OUTPUT = os.fdopen(os.dup(1), "w", buffering=1)
# Older releases of DeepSpeed log to stdout.
os.dup2(2, 1)


def evaluate(accelerator: Any, model: Any) -> None:
    model.eval()
    data = torch.utils.data.TensorDataset(torch.randn(12, 4))
    with torch.no_grad():
        for number, (batch,) in enumerate(accelerator.prepare(torch.utils.data.DataLoader(data, batch_size=4))):
            model(batch)
            if number == 0:
                os.kill(os.getpid(), signal.SIGTERM)
    print("evaluated", file=OUTPUT)
    model.train()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--evaluate-at", type=int)
    parser.add_argument("--load", action="store_true")
    arguments = parser.parse_args()

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    set_seed(0)
    accelerator: Any = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=CONFIG),
        project_config=ProjectConfiguration(
            project_dir=os.environ["KEEPSTEP_CHECKPOINT_DIRECTORY"], automatic_checkpoint_naming=True
        ),
    )
    keepstep.protect(accelerator)
    layer = torch.nn.Linear(4, 1)
    data = torch.utils.data.TensorDataset(torch.randn(64, 4))
    model, optimizer, loader = accelerator.prepare(
        layer, torch.optim.AdamW(layer.parameters()), torch.utils.data.DataLoader(data, batch_size=4)
    )
    if arguments.load:
        accelerator.load_state()
    engine = accelerator.deepspeed_engine_wrapped.engine
    print(f"begin step={engine.global_steps}", file=OUTPUT)
    for (batch,) in loader:
        if engine.global_steps == arguments.steps:
            break
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        print(f"step={engine.global_steps}", file=OUTPUT)
        if engine.global_steps == arguments.evaluate_at:
            evaluate(accelerator, model)
    accelerator.save_state()
    accelerator.end_training()
    print("done", file=OUTPUT)


if __name__ == "__main__":
    main()

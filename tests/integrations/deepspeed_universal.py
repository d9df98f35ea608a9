"""A ZeRO training that knows nothing of Keepstep and goes on from the universal form of its last checkpoint.

    deepspeed_universal.py OUTPUT STEPS

DeepSpeed's own tool converts that checkpoint, and writes `latest_universal`, by which DeepSpeed finds it.
"""

import argparse
import os
import sys
from pathlib import Path

import deepspeed
import torch
from deepspeed.checkpoint import ds_to_universal

OUTPUT = os.fdopen(os.dup(1), "w", buffering=1)
# DeepSpeed and its tool print a lot.
os.dup2(2, 1)


def config(*, universal: bool) -> dict[str, object]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
        "zero_optimization": {"stage": 1},
        "checkpoint": {"load_universal": universal},
    }


def main() -> None:
    output, last = Path(sys.argv[1]), int(sys.argv[2])
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    torch.manual_seed(0)
    universal = (output / "latest_universal").exists()
    model = torch.nn.Linear(4, 1)
    engine, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config(universal=universal)
    )
    if universal:
        engine.load_checkpoint(str(output))
    print(f"begin step={engine.global_steps}", file=OUTPUT)
    while engine.global_steps < last:
        engine.backward(engine(torch.ones(2, 4)).square().mean())
        engine.step()
    print(f"end weight={model.weight.sum().item():.6f}", file=OUTPUT)
    tag = f"global_step{last}"
    engine.save_checkpoint(str(output), tag)
    ds_to_universal.main(
        argparse.Namespace(
            input_folder=str(output / tag),
            output_folder=str(output / f"{tag}_universal"),
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=True,
        )
    )


if __name__ == "__main__":
    main()

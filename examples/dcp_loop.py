"""A loop around torch.distributed.checkpoint that knows nothing of Keepstep: each of its saves goes to the bucket.

    torchrun --nproc-per-node 2 examples/dcp_loop.py
    keepstep run --to s3://bucket/runs/one --autoload -- torchrun --nproc-per-node 2 examples/dcp_loop.py

The name of a checkpoint ends in its step. No just-in-time save this way, because nobody but this loop knows what its
state is: see ddp.py and fsdp2.py for that.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as distributed
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

CHECKPOINTS = Path(os.environ.get("KEEPSTEP_CHECKPOINT_DIRECTORY", "checkpoints"))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--asynchronous", action="store_true", help="go on training while a checkpoint is written")
    arguments = parser.parse_args()

    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    # Its own group: the writing thread's collectives must not meet the training's.
    writers = distributed.new_group(backend="gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = resume(model, optimizer)

    writing: Any = None
    while step < arguments.steps:
        # What a rank sees at a step follows from the two alone.
        generator = torch.Generator().manual_seed(step * distributed.get_world_size() + rank)
        inputs = torch.randn(32, 16, generator=generator)
        loss = torch.nn.functional.mse_loss(model(inputs), inputs.square().sum(dim=1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if rank == 0:
            print(f"step={step} loss={loss.item()!r}", flush=True)

        if step % arguments.save_every == 0 or step == arguments.steps:
            path = CHECKPOINTS / f"step-{step}"
            if arguments.asynchronous:
                if writing is not None:
                    writing.result()
                writing = dcp.async_save(state(model, optimizer, step), checkpoint_id=path, process_group=writers)
            else:
                dcp.save(state(model, optimizer, step), checkpoint_id=path)

    if writing is not None:
        writing.result()
    distributed.destroy_process_group()


def state(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state, "step": step}


def resume(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """The step of the newest checkpoint that is complete; 0 if there is none."""
    # DCP writes .metadata last.
    complete = [path for path in CHECKPOINTS.glob("step-*") if (path / ".metadata").exists()]
    if not complete:
        return 0
    found = state(model, optimizer, 0)
    dcp.load(found, checkpoint_id=max(complete, key=lambda path: int(path.name.removeprefix("step-"))))
    set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
    return int(found["step"])


if __name__ == "__main__":
    main()

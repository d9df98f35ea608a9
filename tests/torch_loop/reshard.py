"""Trains some steps with replicated, then sharded weights and says what it has: by one number of ranks, then another.

torchrun … tests/torch_loop/reshard.py <folder to begin with, or -> <steps> <folder to end with, or ->

A folder holds a checkpoint of each kind; every line begins with the kind.
"""

import hashlib
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from keepstep.torch_loop import TrainingState

SAMPLES = 64
BATCH = 4


def main() -> None:
    begin, steps, end = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    for kind in ("ddp", "fsdp2"):
        train(kind, begin, steps, end)
    if dist.is_initialized():
        dist.destroy_process_group()


def train(kind: str, begin: str, steps: int, end: str) -> None:
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    torch.manual_seed(rank if begin == "-" else 99)
    # An odd number of rows: the shards are not of one size.
    model: torch.nn.Module = torch.nn.Sequential(torch.nn.Linear(1, 7), torch.nn.Dropout(0.1), torch.nn.Linear(7, 1))
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 0.1)
    if kind == "fsdp2" and dist.is_initialized():
        fully_shard(model, mesh=dist.init_device_mesh("cpu", (world_size,)))
    elif dist.is_initialized():
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    samples = torch.arange(SAMPLES).float()
    sampler = DistributedSampler[torch.Tensor](samples, world_size, rank)  # type: ignore[arg-type]
    loader = StatefulDataLoader(samples, batch_size=BATCH, sampler=sampler)
    state = TrainingState(model, optimizer, scheduler=scheduler, loader=loader)
    if begin != "-":
        state.restore(Path(begin, kind))
        tell(f"{kind} begins with", model, optimizer, scheduler, state)
    for number, batch in zip(range(1, steps + 1), state.batches(epochs=1), strict=False):
        say(kind, "batch", *batch.int().tolist())
        model(batch[:, None] / SAMPLES).square().mean().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        state.step += 1
        if number == steps and end != "-":
            state.save(Path(end, kind))
    say(kind, "draws", torch.rand(1).item())
    tell(f"{kind} ends with", model, optimizer, scheduler, state)


def say(*words: object) -> None:
    """In one write: the ranks share a pipe."""
    sys.stdout.write(" ".join(str(word) for word in words) + "\n")


def tell(word: str, model: Any, optimizer: Any, scheduler: Any, state: TrainingState) -> None:
    weights, optimizer_state = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    digest = hashlib.sha256()
    moments: Any = optimizer_state["state"]
    for name in sorted(weights):
        values: list[Any] = [
            weights[name],
            moments[name]["exp_avg"],
            moments[name]["exp_avg_sq"],
            moments[name]["step"],
        ]
        for tensor in values:
            digest.update(tensor.numpy().tobytes())
    if state.storage.rank == 0:
        say(word, digest.hexdigest(), scheduler.get_last_lr(), state.step, state.epoch)


if __name__ == "__main__":
    main()

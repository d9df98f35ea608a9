"""Sharded training (FSDP2) that survives its pod; each rank saves its shards while training goes on.

torchrun --nproc-per-node 2 examples/fsdp2.py
keepstep run --to s3://bucket/runs/fsdp2 -- torchrun --nproc-per-node 2 examples/fsdp2.py
"""

import argparse
import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DistributedSampler, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from keepstep.torch_loop import TorchLoop


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps in all")
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    inputs = torch.randn(768, 16)
    data = TensorDataset(inputs, inputs.square().sum(dim=1, keepdim=True))
    blocks = [torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Dropout(0.1), torch.nn.GELU()) for _ in range(4)]
    model = torch.nn.Sequential(*blocks, torch.nn.Linear(16, 1))
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    torch.manual_seed(1 + dist.get_rank())

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)
    loader = StatefulDataLoader(
        data, batch_size=16, sampler=DistributedSampler(data, seed=0), num_workers=arguments.workers
    )
    loop = TorchLoop(model, optimizer, scheduler=scheduler, loader=loader)

    for features, targets in loop.batches(steps=arguments.steps):
        loss = torch.nn.functional.mse_loss(model(features), targets)
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step={loop.steps_done + 1} loss={loss.item()!r}", flush=True)
        loop.step(every=arguments.save_every)

    loop.finish()
    weights: dict[str, Any] = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if dist.get_rank() == 0:
        digest = hashlib.sha256(b"".join(weight.numpy().tobytes() for weight in weights.values())).hexdigest()
        print(f"done step={loop.steps_done} weights={digest}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

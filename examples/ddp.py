"""Data-parallel training (DDP) that survives its pod: stopped at any step and started again, it ends bit-identical.

torchrun --nproc-per-node 2 examples/ddp.py
keepstep run --to s3://bucket/runs/ddp -- torchrun --nproc-per-node 2 examples/ddp.py
"""

import argparse
import hashlib
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from keepstep.torch_loop import TorchLoop


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps in all")
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--accumulate", type=int, default=2, help="batches for one optimizer step")
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()

    dist.init_process_group("gloo")
    # The same model on all ranks; each rank then draws its own dropout.
    torch.manual_seed(0)
    inputs = torch.randn(768, 16)
    data = TensorDataset(inputs, inputs.square().sum(dim=1, keepdim=True))
    layers = [torch.nn.Linear(16, 64), torch.nn.Dropout(0.1), torch.nn.ReLU(), torch.nn.Linear(64, 1)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    torch.manual_seed(1 + dist.get_rank())

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)
    loader = StatefulDataLoader(
        data, batch_size=16, sampler=DistributedSampler(data, seed=0), num_workers=arguments.workers
    )
    loop = TorchLoop(model, optimizer, scheduler=scheduler, loader=loader)

    for number, (features, targets) in enumerate(loop.batches(steps=arguments.steps), start=1):
        last = number % arguments.accumulate == 0
        with nullcontext() if last else model.no_sync():
            loss = torch.nn.functional.mse_loss(model(features), targets) / arguments.accumulate
            loss.backward()
        if last:
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if dist.get_rank() == 0:
                print(f"step={loop.steps_done + 1} loss={loss.item()!r}", flush=True)
            loop.step(every=arguments.save_every)

    loop.finish()
    if dist.get_rank() == 0:
        weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
        print(f"done step={loop.steps_done} weights={hashlib.sha256(weights).hexdigest()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

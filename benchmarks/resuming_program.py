"""Optimizes one weight matrix per layer, and says when it has done its first step.

    python benchmarks/resuming_program.py LAYERS WIDTH STEPS [--no-save]

On several ranks FSDP2 shards it. Without --no-save it saves the last step.
"""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import keepstep.torch_loop


def main() -> None:
    layers, width, steps = (int(word) for word in sys.argv[1:4])
    # As FSDP2's own examples do: no rank ever has the whole model.
    with torch.device("meta"):
        model: torch.nn.Module = torch.nn.Sequential(
            *(torch.nn.Linear(width, width, bias=False) for _ in range(layers))
        )
    momentum = 0.0
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        fully_shard(model, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
        momentum = 0.9
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.uniform_(parameter, -0.01, 0.01)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=momentum)
    loop = keepstep.torch_loop.TorchLoop(model, optimizer)
    print(f"resumed {loop.steps_done}", flush=True)
    said = False
    while not said or loop.steps_done < steps:
        # Without a forward pass, for which all ranks would share this machine's cores for a minute.
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        if not said:
            print(f"first step at {time.time()}", flush=True)
            said = True
        loop.step(every=0)
    if "--no-save" in sys.argv:
        if dist.is_initialized():
            dist.barrier()
        os._exit(0)
    loop.finish()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Trains a model that FSDP2 shards over all ranks, and says what it resumed with.

RANK=… python tests/torch_loop/sharded.py <layers> <width> <steps> [<rows of one frozen, transposed tensor>]

Prints `resumed <step>` and, on rank 0, `has <digest of all weights and moments>` after the resume and at the end.
"""

import hashlib
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.fsdp import fully_shard

from keepstep.torch_loop import TorchLoop


def main() -> None:
    layers, width, steps = (int(word) for word in sys.argv[1:4])
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers)))
    if len(sys.argv) > 4:
        # Its elements do not lie in the order of its rows.
        rows = int(sys.argv[4])
        model.register_buffer("transposed", torch.rand(width, rows).t())
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
    # One moment for each weight.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loop = TorchLoop(model, optimizer)
    say("resumed", loop.steps_done)
    tell(model, optimizer)
    while loop.steps_done < steps:
        model(torch.ones(1, width)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        loop.step(every=0)
    tell(model, optimizer)
    loop.finish()
    dist.destroy_process_group()


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def tell(model: Any, optimizer: Any) -> None:
    weights: Any
    weights, moments = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    if dist.get_rank() == 0:
        digest = hashlib.sha256()
        state: Any = moments["state"]
        for name in sorted(weights):
            digest.update(weights[name].contiguous().numpy().data)
            if name in state:
                digest.update(state[name]["momentum_buffer"].contiguous().numpy().data)
        say("has", digest.hexdigest())


if __name__ == "__main__":
    main()

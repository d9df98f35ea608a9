"""Two ranks save at steps 2 and 4, and at the end; rank 1's first write does not return before the training is over.

torchrun … tests/torch_loop/stuck_rank.py

Every wait of ours for a write is shorter here: an hour, or half of one, are ten seconds.
"""

import contextlib
import functools
import sys
import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.nn.parallel import DistributedDataParallel

from keepstep import VolumeError
from keepstep.asynchronous_saves import background_writer
from keepstep.ranks.coordinator import StoreCoordinator
from keepstep.torch_loop import TorchLoop

SHORT_SECONDS = 10.0


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    # DCP's collectives, between two of which the other rank waits for this one's write.
    dist.new_group = functools.partial(dist.new_group, timeout=timedelta(seconds=SHORT_SECONDS))
    background_writer._PATIENCE_SECONDS = SHORT_SECONDS  # type: ignore[misc]
    agree = StoreCoordinator._agree

    def agree_soon(ranks: StoreCoordinator, key: str, ok: bool, *_: object) -> bool | None:
        return agree(ranks, key, ok, SHORT_SECONDS)

    over = threading.Event()
    write = dcp.FileSystemWriter.write_data

    def hang(writer: dcp.FileSystemWriter, *arguments: Any) -> Any:
        assert over.wait(300)
        return write(writer, *arguments)

    if rank == 1:
        dcp.FileSystemWriter.write_data = hang  # type: ignore[method-assign,assignment]
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    loop = TorchLoop(model, optimizer)
    # The ranks have met by now, however long that took.
    StoreCoordinator._agree = agree_soon  # type: ignore[method-assign,assignment]
    for _ in range(4):
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        loop.step(every=2)
        dist.barrier()
    with contextlib.suppress(VolumeError):
        # The last step is saved by nobody, and said to be lost.
        loop.finish()
    # In one write: the ranks share a pipe.
    sys.stdout.write(f"done {rank} {loop.steps_done}\n")
    sys.stdout.flush()
    over.set()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

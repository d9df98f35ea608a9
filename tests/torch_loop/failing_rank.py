"""Two ranks save at steps 2, 4, 6 and 8: rank 1 cannot write the first, and cannot copy its state for the second.

When all have written the third, rank 0 fails in a way that nobody thought of.

torchrun … tests/torch_loop/failing_rank.py
"""

import resource
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from keepstep import Checkpointer
from keepstep.checkpoints.staged_save import StagedSave
from keepstep.torch_loop import TorchLoop, TrainingState


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(512, 512))
    optimizer = torch.optim.AdamW(model.parameters())
    capture = TrainingState.capture
    failing = {"copy": False}

    def capture_or_fail(state: TrainingState) -> dict[str, object]:
        if failing["copy"]:
            raise MemoryError("no room for a copy")
        return capture(state)

    sync = StagedSave.sync

    def sync_or_fail(save: StagedSave) -> object:
        if save.path.name == "checkpoint-6":
            raise ValueError("nobody thought of this")
        return sync(save)

    TrainingState.capture = capture_or_fail  # type: ignore[method-assign,assignment]
    StagedSave.sync = sync_or_fail  # type: ignore[method-assign,assignment]
    checkpointer = Checkpointer(keep_local=10)
    loop = TorchLoop(model, optimizer, checkpointer=checkpointer)
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for step in range(1, 9):
        model(torch.randn(4, 512)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 1:
            # As on a full disk, a write fails in the middle of a file.
            resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 1024 if step == 2 else hard, hard))
            failing["copy"] = step == 4
        loop.step(every=2)
        # The write is to fail, and not a later one.
        checkpointer.wait()
        dist.barrier()
    loop.finish()
    # In one write: the ranks share a pipe.
    sys.stdout.write(f"done {rank} {loop.steps_done}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Rank 0 saves for all, as programs for Horovod do: one Checkpointer, `rank0_only=True`, on rank 0.

    torchrun --nproc-per-node 2 examples/horovod_style.py
    keepstep run --to s3://bucket/runs/one -- torchrun --nproc-per-node 2 examples/horovod_style.py

Every rank holds the same model, so that rank 0's state is the state of all. What rank 0 knows alone it tells the others
by a broadcast of the program's own. Here torch.distributed stands in for Horovod; with that it reads
`horovod.torch.broadcast_object(value, root_rank=0)`. A notice must reach rank 0, by the agent, as in a pod, or by
SIGTERM to it or to the whole job.
"""

import argparse
import signal
from typing import Any, TypeVar

import torch
import torch.distributed as distributed

import keepstep

T = TypeVar("T")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save-every", type=int, default=20)
    arguments = parser.parse_args()

    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    checkpointer = keepstep.Checkpointer(rank0_only=True) if rank == 0 else None
    if rank != 0:
        # The launcher's SIGTERM goes to all ranks; the others stay for rank 0's last save, and leave with it.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    state: dict[str, Any] | None = None
    if checkpointer is not None and (path := checkpointer.resume()) is not None:
        state = torch.load(path / "state.pt", weights_only=True)
    state = broadcast(state)
    step = 0
    if state is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]

    stopping = False
    while step < arguments.steps and not stopping:
        # What a rank sees at a step follows from the two alone.
        generator = torch.Generator().manual_seed(step * distributed.get_world_size() + rank)
        inputs = torch.randn(32, 16, generator=generator)
        loss = torch.nn.functional.mse_loss(model(inputs), inputs.square().sum(dim=1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        for gradient in gradients:
            distributed.all_reduce(gradient)
            gradient /= distributed.get_world_size()
        optimizer.step()
        step += 1
        if rank == 0:
            print(f"step={step} loss={loss.item()!r}", flush=True)

        if checkpointer is not None:
            last = step == arguments.steps
            if last or checkpointer.should_save(step, every=arguments.save_every):
                with checkpointer.save(step, kind="final" if last else None) as directory:
                    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                    torch.save(states, directory / "state.pt")
        stopping = broadcast(checkpointer.stopping if checkpointer else False)

    distributed.destroy_process_group()
    if checkpointer is not None:
        checkpointer.finish()
    elif stopping:
        raise SystemExit(143)


def broadcast(value: T) -> T:
    """What rank 0 has."""
    values = [value]
    distributed.broadcast_object_list(values)
    return values[0]


if __name__ == "__main__":
    main()

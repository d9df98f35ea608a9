"""DeepSpeed ZeRO-3 in a loop that survives its pod: stop it at any step, start it again, it goes on.

    torchrun --nproc-per-node 2 examples/deepspeed_zero3.py

The engine's own count of steps says where the data goes on, so that nothing else needs to be saved.
"""

import argparse
import os
from collections.abc import Iterator
from itertools import islice

import deepspeed
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import keepstep

OUTPUT = os.environ.get("KEEPSTEP_CHECKPOINT_DIRECTORY", "checkpoints")
CONFIG = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 3},
    # PyTorch's own AdamW, which needs nothing compiled.
    "zero_allow_untested_optimizer": True,
}


def batches(
    loader: DataLoader[tuple[torch.Tensor, ...]], sampler: DistributedSampler[tuple[torch.Tensor, ...]], begin: int
) -> Iterator[tuple[torch.Tensor, ...]]:
    """Epoch after epoch, without the first `begin` batches of all."""
    epoch, skip = divmod(begin, len(loader))
    while True:
        sampler.set_epoch(epoch)
        yield from islice(loader, skip, None)
        epoch, skip = epoch + 1, 0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save-every", type=int, default=20)
    arguments = parser.parse_args()

    if not torch.cuda.is_available():
        # DeepSpeed would compile it at the first start, for a minute.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    torch.manual_seed(0)
    inputs = torch.randn(400, 16)
    dataset = TensorDataset(inputs, inputs.square().sum(dim=1, keepdim=True))
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1, bias=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)
    keepstep.protect(engine)
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler, num_workers=2)
    engine.load_checkpoint(OUTPUT)

    accumulation = engine.gradient_accumulation_steps()
    for batch, target in batches(loader, sampler, engine.global_steps * accumulation):
        if engine.global_steps >= arguments.steps:
            break
        loss = torch.nn.functional.mse_loss(engine(batch.to(engine.device)), target.to(engine.device))
        engine.backward(loss)
        ends_step = engine.is_gradient_accumulation_boundary()
        engine.step()
        if not ends_step:
            continue
        step = engine.global_steps
        if engine.global_rank == 0:
            print(f"step={step} loss={loss.item()!r}", flush=True)
        if step % arguments.save_every == 0 or step == arguments.steps:
            engine.save_checkpoint(OUTPUT)
    engine.destroy()


if __name__ == "__main__":
    main()

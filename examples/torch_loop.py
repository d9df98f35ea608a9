"""A complete PyTorch loop that survives its pod: stop it at any step, start it again, the result is bit-identical.

Saves below ./checkpoints:      python examples/torch_loop.py
And off the disk, to a bucket:  keepstep run --to s3://bucket/runs/demo -- python examples/torch_loop.py
"""

import hashlib

import torch

import keepstep

STEPS, SAVE_EVERY, BATCH = 1000, 100, 32


def main() -> None:
    torch.manual_seed(0)
    inputs = torch.randn(1024, 16)
    targets = inputs.square().sum(dim=1, keepdim=True)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Dropout(0.1), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = 0

    checkpointer = keepstep.Checkpointer()
    if (path := checkpointer.resume()) is not None:
        state = torch.load(path / "state.pt", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"])
        step = state["step"]
    print(f"begin step={step}", flush=True)

    batches = len(inputs) // BATCH
    while step < STEPS and not checkpointer.stopping:
        # The order of the data follows from the epoch alone, so the step is all there is to save of it.
        epoch, batch = divmod(step, batches)
        order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(epoch))
        chosen = order[batch * BATCH : (batch + 1) * BATCH]
        loss = torch.nn.functional.mse_loss(model(inputs[chosen]), targets[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step % SAVE_EVERY == 0:
            print(f"step={step} loss={loss.item():.3f}", flush=True)

        if step == STEPS or checkpointer.should_save(step, every=SAVE_EVERY):
            with checkpointer.save(step, kind="final" if step == STEPS else None) as directory:
                states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save({**states, "rng": torch.get_rng_state(), "step": step}, directory / "state.pt")

    checkpointer.finish()
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    print(f"done step={step} weights={hashlib.sha256(weights).hexdigest()[:16]}", flush=True)


if __name__ == "__main__":
    main()

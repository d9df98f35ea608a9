"""A small ZeRO-3 training in one process that keeps its count of steps in `client_state`; it tells itself to end.

`told_at`: after how many micro-batches of this start the process sends itself SIGTERM. `evaluate_at`: after which step
it evaluates, and sends it in there.
"""

import argparse
import os
import signal
from pathlib import Path

import deepspeed
import torch

import keepstep

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "zero_optimization": {"stage": 3},
    "zero_allow_untested_optimizer": True,
}

OUTPUT = os.fdopen(os.dup(1), "w", buffering=1)
# Older releases of DeepSpeed log to stdout.
os.dup2(2, 1)


def evaluate(engine: deepspeed.DeepSpeedEngine) -> None:
    engine.eval()
    with torch.no_grad():
        for batch in range(3):
            engine(torch.ones(2, 4))
            if batch == 0:
                os.kill(os.getpid(), signal.SIGTERM)
    engine.train()
    print("evaluated", file=OUTPUT)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--save-every", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path(os.environ["KEEPSTEP_CHECKPOINT_DIRECTORY"]))
    parser.add_argument("--load", type=Path)
    parser.add_argument("--tag")
    parser.add_argument("--weights-only", action="store_true")
    parser.add_argument("--told-at", type=int)
    parser.add_argument("--evaluate-at", type=int)
    parser.add_argument("--eval-mode", action="store_true", help="train in it, as one does without dropout")
    arguments = parser.parse_args()

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    torch.manual_seed(0)
    model = torch.nn.Linear(arguments.width, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)
    keepstep.protect(keepstep.protect(engine))
    engine.train(not arguments.eval_mode)
    state = {"mine": 0}
    if arguments.load is not None:
        path, loaded = engine.load_checkpoint(
            str(arguments.output if arguments.load == Path("own") else arguments.load),
            tag=arguments.tag,
            load_module_only=arguments.weights_only,
        )
        print(f"loaded={None if path is None else Path(path).parent.name}", file=OUTPUT)
        if loaded is not None:
            state["mine"] = loaded["mine"]
    print(f"begin step={engine.global_steps} mine={state['mine']}", file=OUTPUT)
    batches, loss = 0, torch.zeros(())
    while engine.global_steps < arguments.steps:
        if batches == arguments.told_at:
            os.kill(os.getpid(), signal.SIGTERM)
        batches += 1
        loss = engine(torch.ones(2, arguments.width)).square().mean()
        engine.backward(loss)
        ends_step = engine.is_gradient_accumulation_boundary()
        engine.step()
        if not ends_step:
            continue
        state["mine"] += 1
        print(f"step={engine.global_steps}", file=OUTPUT)
        if engine.global_steps % arguments.save_every == 0:
            engine.save_checkpoint(str(arguments.output), tag=f"at-{engine.global_steps}", client_state=state)
        if engine.global_steps == arguments.evaluate_at:
            evaluate(engine)
    print(f"loss={loss.item()!r}", file=OUTPUT)
    print("done", file=OUTPUT)


if __name__ == "__main__":
    main()

"""Trainings on a GPU, each in a process of its own.

    program.py WAY DIRECTORY DEVICE [--stop-at STEP]

Most print the loss of each step, exactly. With `--stop-at` they send SIGTERM to themselves in that step.
"""

import argparse
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import keepstep

STEPS = 12
SIDE = 512


def make(device: str, side: int = SIDE) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(side, side) for _ in range(8)]).to(device)
    return model, torch.optim.AdamW(model.parameters(), capturable=device == "cuda")


def report(step: int, loss: torch.Tensor) -> None:
    print("loss", step, float(loss).hex(), flush=True)


def stop_in(step: int, options: argparse.Namespace) -> None:
    if step == options.stop_at:
        os.kill(os.getpid(), signal.SIGTERM)


def one_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad(set_to_none=False)
    loss: torch.Tensor = model(inputs).square().mean()
    loss.backward()
    optimizer.step()
    return loss


def checkpointer(options: argparse.Namespace) -> None:
    saver = keepstep.Checkpointer(options.directory)
    model, optimizer = make(options.device)
    found, step = saver.resume(), 0
    if found is not None:
        state = torch.load(found / "state.pt", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["random"])
        step = state["step"]
    while step < STEPS and not saver.stopping:
        loss = one_step(model, optimizer, torch.randn(64, SIDE).to(options.device))
        step += 1
        report(step, loss)
        stop_in(step, options)
        if saver.should_save(step, every=4):
            with saver.save(step) as folder:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save({**state, "random": torch.get_rng_state(), "step": step}, folder / "state.pt")
    saver.finish()


def torch_loop(options: argparse.Namespace) -> None:
    from keepstep.torch_loop import TorchLoop

    model, optimizer = make(options.device)
    loop = TorchLoop(model, optimizer, checkpointer=keepstep.Checkpointer(options.directory))
    while loop.steps_done < STEPS:
        loss = one_step(model, optimizer, torch.randn(64, SIDE, device=options.device))
        report(loop.steps_done + 1, loss)
        stop_in(loop.steps_done + 1, options)
        loop.step(every=4)
    loop.finish()


def hugging_face(options: argparse.Namespace) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, _ = make("cpu")

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.layers(torch.nn.functional.dropout(x, 0.1)).square().mean()}

    class Rows(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 64 * STEPS

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            return {"x": torch.full((SIDE,), index / 64)}

    class Stops(TrainerCallback):  # type: ignore[misc]  # transformers may not be installed where mypy is
        def on_step_end(self, arguments: Any, state: Any, control: Any, **_: Any) -> None:
            stop_in(state.global_step, options)

        def on_log(self, arguments: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
            if "loss" in logs:
                print("loss", state.global_step, logs["loss"], flush=True)

    arguments = TrainingArguments(
        str(options.directory),
        max_steps=STEPS,
        save_steps=4,
        logging_steps=1,
        per_device_train_batch_size=64,
        report_to=[],
        use_cpu=options.device == "cpu",
        disable_tqdm=True,
        dataloader_pin_memory=options.device != "cpu",
    )
    trainer = Trainer(model=Model(), args=arguments, train_dataset=Rows(), callbacks=[Stops()])
    keepstep.protect(trainer, asynchronous=True)
    trainer.train()


def graph(options: argparse.Namespace) -> None:
    """A step that a CUDA graph captures after one warm-up step; saves between replays."""
    saver = keepstep.Checkpointer(options.directory)
    model, optimizer = make(options.device)
    inputs = torch.randn(64, SIDE, device=options.device)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        one_step(model, optimizer, inputs)
    torch.cuda.current_stream().wait_stream(stream)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        one_step(model, optimizer, inputs)
    replay_and_save(saver, model, captured.replay)


def compiled(options: argparse.Namespace) -> None:
    """A whole step that is compiled, the optimizer's too."""
    saver = keepstep.Checkpointer(options.directory)
    model, optimizer = make(options.device)
    inputs = torch.randn(64, SIDE, device=options.device)
    step = torch.compile(one_step, backend="inductor" if options.device == "cuda" else "eager")
    replay_and_save(saver, model, lambda: step(model, optimizer, inputs))


def replay_and_save(saver: keepstep.Checkpointer, model: torch.nn.Module, step: Callable[[], object]) -> None:
    for number in range(1, STEPS + 1):
        step()
        if saver.should_save(number, every=4):
            with saver.save(number) as folder:
                saved = {name: value.clone() for name, value in model.state_dict().items()}
                torch.save(model.state_dict(), folder / "state.pt")
    saver.finish()
    found = torch.load(saver.resume() / "state.pt")  # type: ignore[operator]
    print("equal", all(torch.equal(found[name], value) for name, value in saved.items()), flush=True)


def failing(options: argparse.Namespace) -> None:
    """An assertion on the device fails while a save is being written."""
    saver = keepstep.Checkpointer(options.directory)
    model, optimizer = make(options.device, side=2048)
    one_step(model, optimizer, torch.randn(64, 2048, device=options.device))
    with saver.save(1) as folder:
        torch.save({"model": model.state_dict(), "sum": sums(model)}, folder / "state.pt")
    torch._assert_async(torch.zeros(1, device=options.device))
    if options.device == "cuda":
        torch.cuda.synchronize()


def sums(model: torch.nn.Module) -> list[float]:
    return [parameter.double().sum().item() for parameter in model.parameters()]


WAYS = {function.__name__: function for function in (checkpointer, torch_loop, hugging_face, graph, compiled, failing)}

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("directory", type=Path)
    parser.add_argument("device")
    parser.add_argument("--stop-at", type=int, default=-1)
    chosen = parser.parse_args()
    torch.use_deterministic_algorithms(True)
    WAYS[chosen.way](chosen)
    sys.exit(0)

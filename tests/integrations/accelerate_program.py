"""A small training with Accelerate in one process, in the shapes that loops have; it tells itself to end.

`told_at`: after how many optimizer steps, and at which moment after them, the process sends itself SIGTERM.
"""

import argparse
import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed

import keepstep
from keepstep.integrations import ownership


class Program:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self.step = 0
        set_seed(0)
        automatic = arguments.names == "automatic"
        self._accelerator = Accelerator(
            cpu=True,
            gradient_accumulation_steps=arguments.accumulation,
            project_config=ProjectConfiguration(
                project_dir=str(arguments.output), automatic_checkpoint_naming=automatic
            ),
        )
        keepstep.protect(keepstep.protect(self._accelerator))
        if arguments.trainer_owns:
            ownership.claim(ownership.Owner.TRAINER)
        data = torch.utils.data.TensorDataset(torch.randn(64, 4))
        self._model = self._accelerator.prepare(torch.nn.Linear(4, 1))
        optimizer = torch.optim.AdamW(self._model.parameters())
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        self._optimizer, self._scheduler = self._accelerator.prepare(optimizer, scheduler)
        self._second = self._accelerator.prepare(torch.optim.SGD(self._model.parameters(), lr=1e-3))
        loader = torch.utils.data.DataLoader(data, batch_size=4, num_workers=2)
        self._loader: Any = loader if arguments.loop == "bare" else self._accelerator.prepare(loader)
        self._accelerator.register_for_checkpointing(self)
        if arguments.killed_in_save is not None:
            self._accelerator.register_save_state_pre_hook(self._kill_in_save)

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]

    def run(self) -> None:
        if self._arguments.load is not None:
            self._accelerator.load_state(self._arguments.load or None)
        print(f"begin step={self.step} lr={self._scheduler.get_last_lr()[0]!r}", flush=True)
        while self.step < self._arguments.steps:
            for (batch,) in self._loader:
                self._tell("forward")
                if self._arguments.loop == "accumulate":
                    with self._accelerator.accumulate(self._model):
                        self._train(batch)
                else:
                    self._train(batch)
                if self._accelerator.sync_gradients:
                    self._stepped()
                if self.step == self._arguments.steps:
                    break
        self._accelerator.end_training()
        self._tell("end")
        print("done", flush=True)

    def _train(self, batch: torch.Tensor) -> None:
        self._accelerator.backward(self._model(batch).square().mean())
        for optimizer in (self._optimizer, self._second):
            optimizer.step()
            optimizer.zero_grad()
        self._scheduler.step()

    def _stepped(self) -> None:
        self.step += 1
        print(f"step={self.step}", flush=True)
        if self.step % self._arguments.save_every == 0:
            output = None if self._arguments.names == "automatic" else self._arguments.output / f"step_{self.step}"
            self._accelerator.save_state(output)
            self._tell("save")
        if self._arguments.evaluates:
            self._model.eval()
            data = torch.utils.data.TensorDataset(torch.randn(8, 4))
            for _ in self._accelerator.prepare(torch.utils.data.DataLoader(data, batch_size=2)):
                self._tell("evaluation")
            print(f"evaluated step={self.step}", flush=True)
            self._model.train()

    def _kill_in_save(self, models: object, weights: object, directory: str) -> None:
        if self.step == self._arguments.killed_in_save:
            (Path(directory) / "first.bin").write_bytes(b"written")
            os.kill(os.getpid(), signal.SIGKILL)

    def _tell(self, moment: str) -> None:
        if self._arguments.told_at == [str(self.step), moment]:
            self._arguments.told_at = None
            os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--save-every", type=int, default=2)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--loop", choices=["accumulate", "plain", "bare"], default="plain")
    parser.add_argument("--names", choices=["automatic", "steps"], default="automatic")
    parser.add_argument("--output", type=Path, default=Path(os.environ["KEEPSTEP_CHECKPOINT_DIRECTORY"]))
    parser.add_argument("--load", nargs="?", const="")
    parser.add_argument("--told-at", type=json.loads)
    parser.add_argument("--killed-in-save", type=int)
    parser.add_argument("--evaluates", action="store_true")
    parser.add_argument("--trainer-owns", action="store_true")
    Program(parser.parse_args()).run()


if __name__ == "__main__":
    main()

"""A small training in this process, with everything that a resumed run must go on with."""

import random
from pathlib import Path
from typing import Any, Final

import numpy
import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from keepstep.torch_loop import TrainingState

SAMPLES: Final = 48
BATCH: Final = 4
EPOCH: Final = SAMPLES // BATCH
"""Batches of an epoch."""


class Numbers(Dataset[torch.Tensor]):
    """`augments`: each sample is disturbed by the random generator of the process that makes it."""

    def __init__(self, *, augments: bool) -> None:
        self._augments = augments

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        sample = torch.full((8,), index / SAMPLES)
        return sample + torch.randn(8) * 0.1 if self._augments else sample


def make_loader(kind: str, *, workers: int, augments: bool) -> Any:
    """`kind`: plain or stateful; `-random`: in a random order that the global generator decides."""
    data = Numbers(augments=augments)
    maker = StatefulDataLoader if kind.startswith("stateful") else DataLoader
    sampler = RandomSampler(data) if kind.endswith("random") else None
    return maker(data, batch_size=BATCH, sampler=sampler, num_workers=workers)


class Small:
    """Adam, dropout, a schedule, a scaler, noise of Python's and NumPy's; `accumulate` batches for one step."""

    def __init__(self, loader: Any = None, *, seed: int = 0, accumulate: int = 1, width: int = 8) -> None:
        random.seed(seed)
        numpy.random.seed(seed)
        torch.manual_seed(seed)
        self._accumulate = accumulate
        self.model = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.Dropout(0.5), torch.nn.Linear(width, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, milestones=[5, 9, 14], gamma=0.5)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=3)
        self.state = TrainingState(
            self.model, self.optimizer, scheduler=self.scheduler, scaler=self.scaler, loader=loader
        )
        self.losses: list[str] = []

    def train(self, steps: int) -> list[str]:
        """Until `steps` optimizer steps are done in all; the losses of every batch, exact."""
        for number, batch in enumerate(self.state.batches(), start=1):
            self.backward(batch)
            if number % self._accumulate == 0:
                self.step()
                self.state.step += 1
                if self.state.step >= steps:
                    break
        return self.losses

    def backward(self, batch: torch.Tensor) -> None:
        noise = random.random() + numpy.random.random()
        loss = (self.model(batch) - batch.mean(1, keepdim=True) - noise).square().mean() / self._accumulate
        self.scaler.scale(loss).backward()
        self.losses.append(loss.item().hex())

    def step(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        self.optimizer.zero_grad()

    def everything(self) -> tuple[bytes, ...]:
        """The bytes of weights and optimizer, and the rest in words."""
        tensors = [*self.model.state_dict().values()]
        for values in self.optimizer.state_dict()["state"].values():
            tensors += [values["step"], values["exp_avg"], values["exp_avg_sq"]]
        rest = repr((self.scheduler.state_dict(), self.scaler.state_dict(), self.state.step, self.state.epoch))
        return (*(tensor.numpy().tobytes() for tensor in tensors), rest.encode())


def resumed(directory: Path, loader: Any = None, **arguments: Any) -> Small:
    """Another process's training, as far as its seeds go, that takes over."""
    small = Small(loader, seed=99, **arguments)
    small.state.restore(directory)
    return small

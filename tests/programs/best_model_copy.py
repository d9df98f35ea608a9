"""`checkpoint.pth.tar`, and a copy of it as `model_best.pth.tar` when it is the best, as in PyTorch's example."""

import shutil
from pathlib import Path

import torch
from tests.programs.training import Loaded, SlowFile, State, done, run


def load(output: Path) -> Loaded | None:
    path = output / "checkpoint.pth.tar"
    if not path.exists():
        return None
    checkpoint = torch.load(path)
    return checkpoint["epoch"], checkpoint["state_dict"]["weights"].tolist()


def save(output: Path, step: int, state: State) -> None:
    path = output / "checkpoint.pth.tar"
    with SlowFile(path) as file:
        torch.save({"epoch": step, "state_dict": {"weights": torch.tensor(state, dtype=torch.float64)}}, file)
    if step % 10 == 0:
        shutil.copyfile(path, output / "model_best.pth.tar")


if __name__ == "__main__":
    done(run(load, save))

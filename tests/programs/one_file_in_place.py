"""One `ckpt.pt`, which torch.save writes in place at each save."""

from pathlib import Path

import torch
from tests.programs.training import Loaded, SlowFile, State, done, run


def load(output: Path) -> Loaded | None:
    path = output / "ckpt.pt"
    if not path.exists():
        return None
    checkpoint = torch.load(path)
    return checkpoint["step"], checkpoint["model"].tolist()


def save(output: Path, step: int, state: State) -> None:
    with SlowFile(output / "ckpt.pt") as file:
        torch.save({"step": step, "model": torch.tensor(state, dtype=torch.float64)}, file)


if __name__ == "__main__":
    done(run(load, save))

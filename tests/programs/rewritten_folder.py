"""`last/`, which is deleted and written again at each save: `model.pt`, `optimizer.pt` and `config.json`."""

import json
import shutil
from pathlib import Path

from tests.programs.training import Loaded, State, as_zip, done, from_zip, run, write


def load(output: Path) -> Loaded | None:
    folder = output / "last"
    if not folder.exists():
        return None
    step, state = from_zip((folder / "model.pt").read_bytes())
    assert from_zip((folder / "optimizer.pt").read_bytes())[0] == step, "model and optimizer are of two steps"
    assert json.loads((folder / "config.json").read_bytes()) == {"step": step}, "the configuration is of another step"
    return step, state


def save(output: Path, step: int, state: State) -> None:
    folder = output / "last"
    shutil.rmtree(folder, ignore_errors=True)
    write(folder / "model.pt", as_zip(step, state))
    write(folder / "optimizer.pt", as_zip(step, []))
    write(folder / "config.json", json.dumps({"step": step}).encode())


if __name__ == "__main__":
    done(run(load, save))

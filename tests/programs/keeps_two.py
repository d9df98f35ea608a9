"""`ckpt-N/` with weights and optimizer, of which it keeps the last two: the older ones it deletes file by file."""

import shutil
from pathlib import Path

from tests.programs.training import Loaded, State, as_zip, done, from_zip, newest, number_in, run, write

KEPT = 2


def load(output: Path) -> Loaded | None:
    folder = newest(output, "ckpt-*")
    if folder is None:
        return None
    step, state = from_zip((folder / "model.pt").read_bytes())
    assert from_zip((folder / "optimizer.pt").read_bytes())[0] == step == number_in(folder), "it is of two steps"
    return step, state


def save(output: Path, step: int, state: State) -> None:
    write(output / f"ckpt-{step}" / "optimizer.pt", as_zip(step, []))
    write(output / f"ckpt-{step}" / "model.pt", as_zip(step, state))
    for folder in sorted(output.glob("ckpt-*"), key=number_in)[:-KEPT]:
        shutil.rmtree(folder)


if __name__ == "__main__":
    done(run(load, save))

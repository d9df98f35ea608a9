"""`outputs/2026-11-23/10-15-00/model.pt`: each start has a directory of its own, and resumes from the latest file."""

import time
from pathlib import Path

from tests.programs.training import Loaded, State, as_zip, done, from_zip, run, write

_BEGAN = time.localtime()


def load(output: Path) -> Loaded | None:
    found = max(output.glob("outputs/*/*/model.pt"), key=lambda path: path.stat().st_mtime, default=None)
    return from_zip(found.read_bytes()) if found else None


def save(output: Path, step: int, state: State) -> None:
    folder = output / time.strftime("outputs/%Y-%m-%d/%H-%M-%S", _BEGAN)
    write(folder / "model.pt", as_zip(step, state))


if __name__ == "__main__":
    done(run(load, save))

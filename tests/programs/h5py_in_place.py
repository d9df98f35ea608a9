"""`state.h5`, which h5py holds open and updates in place: two arrays, and the step as an attribute that is set last."""

from pathlib import Path
from typing import Any

import h5py
import numpy
from tests.programs.training import Loaded, State, done, run, work

_files: dict[Path, Any] = {}


def load(output: Path) -> Loaded | None:
    file = _files[output] = h5py.File(output / "state.h5", "a")
    step = int(file.attrs.get("step", 0))
    if not step:
        return None
    first, second = file["first"][:], file["second"][:]
    assert first[0] == second[0] == step, "it is of several steps"
    return step, first[1:].tolist() + second[1:].tolist()


def save(output: Path, step: int, state: State) -> None:
    file, half = _files[output], len(state) // 2
    for name, values in (("first", state[:half]), ("second", state[half:])):
        dataset = file.require_dataset(name, (half + 1,), dtype="f8")
        dataset[:] = numpy.array([step, *values])
        file.flush()
        work("WRITE_SECONDS")
    file.attrs["step"] = step
    file.flush()


if __name__ == "__main__":
    done(run(load, save))

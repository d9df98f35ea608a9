"""`state.zarr`, a group of zarr with two arrays in place, and the step as an attribute that is set last."""

from pathlib import Path

import numpy
import zarr
from tests.programs.training import Loaded, State, done, run, work


def load(output: Path) -> Loaded | None:
    if not (output / "state.zarr").exists():
        return None
    group = zarr.open_group(output / "state.zarr", mode="r")
    step = int(group.attrs.get("step", 0))
    if not step:
        return None
    first, second = group["first"][:], group["second"][:]
    assert first[0] == second[0] == step, "it is of several steps"
    return step, first[1:].tolist() + second[1:].tolist()


def save(output: Path, step: int, state: State) -> None:
    group, half = zarr.open_group(output / "state.zarr", mode="a"), len(state) // 2
    for name, values in (("first", state[:half]), ("second", state[half:])):
        array = group.require_array(name, shape=(half + 1,), chunks=(8,), dtype="f8")
        array[:] = numpy.array([step, *values])
        work("WRITE_SECONDS")
    group.attrs["step"] = step


if __name__ == "__main__":
    done(run(load, save))

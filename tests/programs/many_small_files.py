"""`state.zarr/KEY/c/N`, forty chunks in place, and `state.zarr/step`, which is written last, as array stores do."""

import json
from pathlib import Path

from tests.programs.training import Loaded, State, done, run, work

COUNT = 40


def load(output: Path) -> Loaded | None:
    folder = output / "state.zarr"
    if not (folder / "step").exists():
        return None
    step = int((folder / "step").read_text())
    chunks = [json.loads((folder / "w/c" / str(number)).read_bytes()) for number in range(COUNT)]
    assert {own for own, _ in chunks} == {step}, "its chunks are of several steps"
    return step, [value for _, values in chunks for value in values]


def save(output: Path, step: int, state: State) -> None:
    folder = output / "state.zarr"
    (folder / "w/c").mkdir(parents=True, exist_ok=True)
    for number in range(COUNT):
        values = state[number * len(state) // COUNT : (number + 1) * len(state) // COUNT]
        (folder / "w/c" / str(number)).write_text(json.dumps([step, values]))
        if number % 8 == 0:
            work("WRITE_SECONDS")
    (folder / "step").write_text(str(step))


if __name__ == "__main__":
    done(run(load, save))

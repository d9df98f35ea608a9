"""`state.ts`, an array of tensorstore (zarr) whose chunks it writes in place by renames, and `state.ts/step` last."""

from pathlib import Path
from typing import Any

import numpy
import tensorstore
from tests.programs.training import Loaded, State, done, run, work


def opened(output: Path, *, create: bool) -> Any:
    spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": f"{output}/state.ts/"}}
    metadata = {"metadata": {"shape": [49], "chunks": [7], "dtype": "<f8"}} if create else {}
    return tensorstore.open({**spec, **metadata}, create=create, open=True).result()


def load(output: Path) -> Loaded | None:
    if not (output / "state.ts/step").exists():
        return None
    values = opened(output, create=False).read().result()
    step = int((output / "state.ts/step").read_text())
    assert values[0] == step, "it is of another step"
    return step, values[1:].tolist()


def save(output: Path, step: int, state: State) -> None:
    opened(output, create=True).write(numpy.array([step, *state])).result()
    work("WRITE_SECONDS")
    (output / "state.ts/step").write_text(str(step))


if __name__ == "__main__":
    done(run(load, save))

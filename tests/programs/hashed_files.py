"""`step-N/data/UUID`, as many as there happen to be, and `step-N/INDEX`, which is written last and names them."""

import json
import shutil
import uuid
from pathlib import Path

from tests.programs.training import Loaded, State, as_json, done, from_json, number_in, run, write

KEPT = 2


def load(output: Path) -> Loaded | None:
    folders = [path.parent for path in output.glob("step-*/INDEX")]
    if not folders:
        return None
    folder = max(folders, key=number_in)
    parts = [from_json((folder / "data" / name).read_bytes()) for name in json.loads((folder / "INDEX").read_bytes())]
    assert {step for step, _ in parts} == {number_in(folder)}, "its parts are of several steps"
    return number_in(folder), [value for _, values in parts for value in values]


def save(output: Path, step: int, state: State) -> None:
    folder, count = output / f"step-{step}", 2 + step % 3
    size = -(-len(state) // count)
    names = [uuid.uuid4().hex for _ in range(count)]
    for number, name in enumerate(names):
        write(folder / "data" / name, as_json(step, state[number * size : (number + 1) * size]))
    write(folder / "INDEX", json.dumps(names).encode())
    for older in sorted(output.glob("step-*"), key=number_in)[:-KEPT]:
        shutil.rmtree(older)


if __name__ == "__main__":
    done(run(load, save))

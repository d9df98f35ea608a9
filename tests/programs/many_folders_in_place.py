"""`model-last/PART/model` for each part of a pipeline, rewritten in place at each save, then `model-last/meta.json`."""

import json
from pathlib import Path

from tests.programs.training import Loaded, State, as_json, done, from_json, run, write

PARTS = ("ner", "tagger", "tok2vec")


def load(output: Path) -> Loaded | None:
    folder = output / "model-last"
    if not (folder / "meta.json").exists():
        return None
    step = json.loads((folder / "meta.json").read_bytes())["step"]
    parts = [from_json((folder / part / "model").read_bytes()) for part in PARTS]
    assert {own for own, _ in parts} == {step}, "its parts are of several steps"
    return step, [value for _, values in parts for value in values]


def save(output: Path, step: int, state: State) -> None:
    size = len(state) // len(PARTS)
    for number, part in enumerate(PARTS):
        write(output / "model-last" / part / "model", as_json(step, state[number * size : (number + 1) * size]))
    write(output / "model-last/meta.json", json.dumps({"step": step}).encode())


if __name__ == "__main__":
    done(run(load, save))

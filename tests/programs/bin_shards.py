"""Two shards and an index, which each save writes in place, as `save_pretrained` into one directory does."""

import json
from pathlib import Path

from tests.programs.training import Loaded, State, as_zip, done, from_zip, run, write

SHARDS = ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"]


def load(output: Path) -> Loaded | None:
    index = output / "pytorch_model.bin.index.json"
    if not index.exists():
        return None
    parts = [from_zip((output / name).read_bytes()) for name in json.loads(index.read_bytes())["shards"]]
    steps = {step for step, _ in parts}
    assert len(steps) == 1, "the shards are of two steps"
    return steps.pop(), [value for _, part in parts for value in part]


def save(output: Path, step: int, state: State) -> None:
    half = len(state) // 2
    for name, part in zip(SHARDS, (state[:half], state[half:]), strict=True):
        write(output / name, as_zip(step, part))
    write(output / "pytorch_model.bin.index.json", json.dumps({"step": step, "shards": SHARDS}).encode())


if __name__ == "__main__":
    done(run(load, save))

"""`step-N/` with eight shards. A large model is gathered before each of them, so a save takes long and has pauses."""

import os
import time
from pathlib import Path

from tests.programs.training import Loaded, State, as_json, done, from_json, newest, run, write

SHARDS = 8
GATHERS_PER_WRITE = 25.0


def load(output: Path) -> Loaded | None:
    found = newest(output, "step-*")
    if found is None:
        return None
    parts = [from_json((found / f"shard-{number}").read_bytes()) for number in range(SHARDS)]
    assert len({step for step, _ in parts}) == 1, "the shards are of several steps"
    return parts[0][0], [value for _, part in parts for value in part]


def save(output: Path, step: int, state: State) -> None:
    length = len(state) // SHARDS
    for number in range(SHARDS):
        time.sleep(GATHERS_PER_WRITE * float(os.environ.get("WRITE_SECONDS", "0")))
        write(output / f"step-{step}" / f"shard-{number}", as_json(step, state[number * length :][:length]))


if __name__ == "__main__":
    done(run(load, save))

"""`states.lmdb`, an LMDB environment in which each step is a transaction, and so is each save."""

import json
from pathlib import Path
from typing import Any

import lmdb
from tests.programs.training import Loaded, State, done, run, work

_environments: dict[Path, Any] = {}


def load(output: Path) -> Loaded | None:
    environment = _environments[output] = lmdb.open(str(output / "states.lmdb"), map_size=1 << 24)
    with environment.begin() as transaction:
        for _ in transaction.cursor():
            pass
        found = transaction.get(b"state")
    return tuple(json.loads(found)) if found else None


def save(output: Path, step: int, state: State) -> None:
    with _environments[output].begin(write=True) as transaction:
        transaction.put(b"state", json.dumps([step, state]).encode())
        work("WRITE_SECONDS")


def log(output: Path, step: int) -> None:
    with _environments[output].begin(write=True) as transaction:
        transaction.put(f"step-{step % 50}".encode(), b"x" * 3000)


if __name__ == "__main__":
    done(run(load, save, on_step=log))

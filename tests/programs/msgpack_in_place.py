"""`state.msgpack`, written in place: nothing in the file shows where it ends."""

from pathlib import Path

import msgspec
from tests.programs.training import Loaded, State, done, run, write


def load(output: Path) -> Loaded | None:
    path = output / "state.msgpack"
    return msgspec.msgpack.decode(path.read_bytes(), type=Loaded) if path.exists() else None


def save(output: Path, step: int, state: State) -> None:
    write(output / "state.msgpack", msgspec.msgpack.encode((step, state)))


if __name__ == "__main__":
    done(run(load, save))

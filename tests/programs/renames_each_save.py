"""`ckpt.pt`, written aside and renamed at each save, without a rest between the saves."""

from pathlib import Path

from tests.programs.training import Loaded, State, as_zip, done, from_zip, run, write


def load(output: Path) -> Loaded | None:
    path = output / "ckpt.pt"
    return from_zip(path.read_bytes()) if path.exists() else None


def save(output: Path, step: int, state: State) -> None:
    write(output / "ckpt.pt.tmp", as_zip(step, state))
    (output / "ckpt.pt.tmp").replace(output / "ckpt.pt")


if __name__ == "__main__":
    done(run(load, save))

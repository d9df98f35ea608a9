"""`model.keras`, a zip archive that each epoch writes in place."""

from pathlib import Path

from tests.programs.training import Loaded, State, as_zip, done, from_zip, run, write


def load(output: Path) -> Loaded | None:
    path = output / "model.keras"
    return from_zip(path.read_bytes()) if path.exists() else None


def save(output: Path, step: int, state: State) -> None:
    write(output / "model.keras", as_zip(step, state))


if __name__ == "__main__":
    done(run(load, save))

"""`runs/exp/version_0/checkpoints/step=10.ckpt`: a file for each step, four folders deep."""

from pathlib import Path

from tests.programs.training import Loaded, State, as_zip, done, from_zip, newest, run, write

FOLDER = "runs/exp/version_0/checkpoints"


def load(output: Path) -> Loaded | None:
    path = newest(output, f"{FOLDER}/step=*.ckpt")
    return from_zip(path.read_bytes()) if path else None


def save(output: Path, step: int, state: State) -> None:
    write(output / FOLDER / f"step={step}.ckpt", as_zip(step, state))


if __name__ == "__main__":
    done(run(load, save))

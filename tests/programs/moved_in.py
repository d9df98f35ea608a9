"""`weights/last.pt`, written in another folder and renamed into this one, beside `results.csv`."""

from pathlib import Path

from tests.programs.training import Loaded, State, as_zip, done, from_zip, run, write


def load(output: Path) -> Loaded | None:
    path = output / "weights/last.pt"
    return from_zip(path.read_bytes()) if path.exists() else None


def save(output: Path, step: int, state: State) -> None:
    aside = output.with_name(f"{output.name}-saving.tmp")
    write(aside, as_zip(step, state))
    (output / "weights").mkdir(exist_ok=True)
    aside.replace(output / "weights/last.pt")


def log(output: Path, step: int) -> None:
    with (output / "results.csv").open("a") as file:
        file.write(f"{step},1.0\n")


if __name__ == "__main__":
    done(run(load, save, on_step=log))

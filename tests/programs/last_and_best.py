"""`weights/last.pt` in place at each save, `weights/best.pt` at some, and a line in `results.csv` at each step."""

from pathlib import Path

from tests.programs.training import Loaded, State, as_zip, done, from_zip, run, write


def load(output: Path) -> Loaded | None:
    last, best = output / "weights/last.pt", output / "weights/best.pt"
    if not last.exists():
        return None
    assert not best.exists() or from_zip(best.read_bytes()), "the best is torn"
    return from_zip(last.read_bytes())


def save(output: Path, step: int, state: State) -> None:
    content = as_zip(step, state)
    write(output / "weights/last.pt", content)
    if step % 3 == 0:
        write(output / "weights/best.pt", content)


def log(output: Path, step: int) -> None:
    with (output / "results.csv").open("a") as file:
        file.write(f"{step},1.0\n")


if __name__ == "__main__":
    done(run(load, save, on_step=log))

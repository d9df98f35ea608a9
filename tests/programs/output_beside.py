"""`ckpt.pt`, and in the same directory what it prints itself, in a file of any name, without a rest."""

from pathlib import Path

from tests.programs.training import Loaded, State, as_zip, done, from_zip, run, write


def load(output: Path) -> Loaded | None:
    path = output / "ckpt.pt"
    return from_zip(path.read_bytes()) if path.exists() else None


def save(output: Path, step: int, state: State) -> None:
    write(output / "ckpt.pt", as_zip(step, state))


def print_to_file(output: Path, step: int) -> None:
    with (output / "console.txt").open("a") as file:
        file.write(f"step {step}: {'=' * (step % 40)}>\n")


if __name__ == "__main__":
    done(run(load, save, on_step=print_to_file))

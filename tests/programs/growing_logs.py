"""`train.log` and an event file, which grow at every step and during evaluation, beside `ckpt.pt`."""

import threading
from pathlib import Path

from tests.programs.training import Loaded, State, as_zip, done, from_zip, run, write

_OFTEN_SECONDS = 0.2


def load(output: Path) -> Loaded | None:
    threading.Thread(target=keep_logging, args=(output,), daemon=True).start()
    path = output / "ckpt.pt"
    return from_zip(path.read_bytes()) if path.exists() else None


def save(output: Path, step: int, state: State) -> None:
    write(output / "ckpt.pt.part", as_zip(step, state))
    (output / "ckpt.pt.part").replace(output / "ckpt.pt")


def keep_logging(output: Path) -> None:
    """As a progress bar and a monitor of the GPU do, whatever the program does meanwhile."""
    never = threading.Event()
    while not never.wait(_OFTEN_SECONDS):
        log(output, 0)


def log(output: Path, step: int) -> None:
    for name in ("train.log", "events.out.tfevents.1763892900.node.1.0"):
        with (output / name).open("a") as file:
            file.write(f"step {step}\n")


if __name__ == "__main__":
    done(run(load, save, on_step=log))

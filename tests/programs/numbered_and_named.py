"""`epoch_N.pth`, of which it keeps three, and `last_checkpoint`, which names the newest. All in place."""

from pathlib import Path

from tests.programs.training import Loaded, State, as_zip, done, from_zip, number_in, run, write

KEPT = 3


def load(output: Path) -> Loaded | None:
    named = output / "last_checkpoint"
    if not named.exists():
        return None
    path = output / named.read_text()
    step, state = from_zip(path.read_bytes())
    assert step == number_in(path), "it is of another step"
    return step, state


def save(output: Path, step: int, state: State) -> None:
    write(output / f"epoch_{step}.pth", as_zip(step, state))
    write(output / "last_checkpoint", f"epoch_{step}.pth".encode())
    for path in sorted(output.glob("epoch_*.pth"), key=number_in)[:-KEPT]:
        path.unlink()


if __name__ == "__main__":
    done(run(load, save))

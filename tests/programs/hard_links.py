"""`checkpoint-N.pth.tar`, renamed, with `last.pth.tar` as another name of the newest, as timm does."""

from pathlib import Path

from tests.programs.training import Loaded, State, as_zip, done, from_zip, number_in, run, write

KEPT = 3


def load(output: Path) -> Loaded | None:
    path = output / "last.pth.tar"
    return from_zip(path.read_bytes()) if path.exists() else None


def save(output: Path, step: int, state: State) -> None:
    aside, path, last = output / "tmp.pth.tar", output / f"checkpoint-{step}.pth.tar", output / "last.pth.tar"
    write(aside, as_zip(step, state))
    aside.replace(path)
    last.unlink(missing_ok=True)
    last.hardlink_to(path)
    for older in sorted(output.glob("checkpoint-*.pth.tar"), key=number_in)[:-KEPT]:
        older.unlink()


if __name__ == "__main__":
    done(run(load, save))

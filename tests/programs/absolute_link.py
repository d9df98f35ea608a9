"""`step-N.pt`, and `latest.pt`, a symbolic link to the newest by its absolute path."""

from pathlib import Path

from tests.programs.training import Loaded, State, as_zip, done, from_zip, run, write


def load(output: Path) -> Loaded | None:
    link = output / "latest.pt"
    if not link.is_symlink():
        assert not list(output.glob("step-*.pt")), "the link is gone"
        return None
    return from_zip(link.read_bytes())


def save(output: Path, step: int, state: State) -> None:
    path, aside = output.absolute() / f"step-{step}.pt", output / "latest.tmp"
    write(path, as_zip(step, state))
    aside.unlink(missing_ok=True)
    aside.symlink_to(path)
    aside.replace(output / "latest.pt")


if __name__ == "__main__":
    done(run(load, save))

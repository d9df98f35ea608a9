"""`step-N/state.json`, and a symbolic link `latest` to the newest, which is what it resumes from."""

from pathlib import Path

from tests.programs.training import Loaded, State, as_json, done, from_json, number_in, run, write


def load(output: Path) -> Loaded | None:
    link = output / "latest"
    if not link.is_symlink():
        return None
    step, state = from_json((link / "state.json").read_bytes())
    assert number_in(link.readlink()) == step, "it is of another step"
    return step, state


def save(output: Path, step: int, state: State) -> None:
    write(output / f"step-{step}" / "state.json", as_json(step, state))
    aside = output / "latest.tmp"
    aside.unlink(missing_ok=True)
    aside.symlink_to(f"step-{step}")
    aside.replace(output / "latest")


if __name__ == "__main__":
    done(run(load, save))

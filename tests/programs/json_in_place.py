"""`progress.json`, rewritten in place at each save, while its text is still being made."""

from pathlib import Path

from tests.programs.training import Loaded, State, as_json, done, from_json, run, write


def load(output: Path) -> Loaded | None:
    path = output / "progress.json"
    return from_json(path.read_bytes()) if path.exists() else None


def save(output: Path, step: int, state: State) -> None:
    write(output / "progress.json", as_json(step, state))


if __name__ == "__main__":
    done(run(load, save))

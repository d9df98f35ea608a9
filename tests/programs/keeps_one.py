"""`ckpt-N.json`, of which it keeps the newest: the one before is deleted when the next is there."""

from pathlib import Path

from tests.programs.training import Loaded, State, as_json, done, from_json, newest, run, write


def load(output: Path) -> Loaded | None:
    path = newest(output, "ckpt-*.json")
    return from_json(path.read_bytes()) if path else None


def save(output: Path, step: int, state: State) -> None:
    path = output / f"ckpt-{step}.json"
    write(path, as_json(step, state))
    for older in output.glob("ckpt-*.json"):
        if older != path:
            older.unlink()


if __name__ == "__main__":
    done(run(load, save))

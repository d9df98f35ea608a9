"""`state/part-0`, `state/part-1` and `state/DONE`, which is there when both parts are."""

from pathlib import Path

from tests.programs.training import Loaded, State, as_json, done, from_json, run, write


def load(output: Path) -> Loaded | None:
    folder = output / "state"
    if not (folder / "DONE").exists():
        return None
    parts = [from_json((folder / f"part-{number}").read_bytes()) for number in range(2)]
    assert parts[0][0] == parts[1][0], "the parts are of two steps"
    return parts[0][0], parts[0][1] + parts[1][1]


def save(output: Path, step: int, state: State) -> None:
    folder, half = output / "state", len(state) // 2
    (folder / "DONE").unlink(missing_ok=True)
    write(folder / "part-0", as_json(step, state[:half]))
    write(folder / "part-1", as_json(step, state[half:]))
    (folder / "DONE").touch()


if __name__ == "__main__":
    done(run(load, save))

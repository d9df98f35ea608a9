"""`step-N/part-K`: eight parts at first, and fewer later, as when layers are frozen; `step-N/parts` is written last."""

from pathlib import Path

from tests.programs.training import Loaded, State, as_json, done, from_json, newest, number_in, run, write


def load(output: Path) -> Loaded | None:
    folder = newest(output, "step-*")
    if folder is None:
        return None
    count = int((folder / "parts").read_text())
    parts = [from_json((folder / f"part-{number}").read_bytes()) for number in range(count)]
    assert {step for step, _ in parts} == {number_in(folder)}, "its parts are of several steps"
    return number_in(folder), [value for _, values in parts for value in values]


def save(output: Path, step: int, state: State) -> None:
    folder, count = output / f"step-{step}", max(2, 8 - 2 * (step // 20))
    size = -(-len(state) // count)
    for number in range(count):
        write(folder / f"part-{number}", as_json(step, state[number * size : (number + 1) * size]))
    write(folder / "parts", str(count).encode())


if __name__ == "__main__":
    done(run(load, save))

"""`step-N.state`, written under a name of its own for longer than a quiet moment, with a pause as long as one."""

from pathlib import Path

from tests.programs.training import Loaded, SlowFile, State, as_json, done, from_json, newest, run, work


def load(output: Path) -> Loaded | None:
    path = newest(output, "step-*.state")
    return from_json(path.read_bytes()) if path else None


def save(output: Path, step: int, state: State) -> None:
    content = as_json(step, state)
    aside, half = output / f".step-{step}.state.incomplete", len(content) // 2
    with SlowFile(aside) as file:
        file.write(content[:half])
        if step % 10 == 0:
            work("EVALUATION_SECONDS")
        file.write(content[half:])
    aside.replace(output / f"step-{step}.state")


if __name__ == "__main__":
    done(run(load, save))

"""Three files form a checkpoint, side by side with those of other steps. It resumes from a step that has all three."""

import json
from pathlib import Path

from tests.programs.training import Loaded, State, as_zip, done, from_zip, number_in, run, write


def paths(output: Path, step: int) -> tuple[Path, Path, Path]:
    return output / f"model_{step:06}.pt", output / f"optim_{step:06}_rank0.pt", output / f"meta_{step:06}.json"


def load(output: Path) -> Loaded | None:
    steps = [number_in(path) for path in output.glob("model_*.pt")]
    complete = [step for step in steps if all(path.exists() for path in paths(output, step))]
    if not complete:
        return None
    model, optimizer, meta = paths(output, max(complete))
    step, state = from_zip(model.read_bytes())
    assert from_zip(optimizer.read_bytes())[0] == step, "model and optimizer are of two steps"
    assert json.loads(meta.read_bytes()) == {"step": step}, "model and metadata are of two steps"
    return step, state


def save(output: Path, step: int, state: State) -> None:
    model, optimizer, meta = paths(output, step)
    write(model, as_zip(step, state))
    write(optimizer, as_zip(step, []))
    write(meta, json.dumps({"step": step}).encode())


if __name__ == "__main__":
    done(run(load, save))

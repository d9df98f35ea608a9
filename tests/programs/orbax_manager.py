"""`STEP/…`, which Orbax's CheckpointManager writes in the background and renames; it keeps two."""

from pathlib import Path
from typing import Any

import numpy
import orbax.checkpoint
from tests.programs.training import Loaded, State, done, run

_managers: dict[Path, Any] = {}


def load(output: Path) -> Loaded | None:
    options = orbax.checkpoint.CheckpointManagerOptions(max_to_keep=2)
    manager = _managers[output] = orbax.checkpoint.CheckpointManager(output.absolute(), options=options)
    step = manager.latest_step()
    if step is None:
        return None
    restored = manager.restore(step, args=orbax.checkpoint.args.StandardRestore({"state": numpy.zeros(48)}))
    return step, restored["state"].tolist()


def save(output: Path, step: int, state: State) -> None:
    manager = _managers[output]
    manager.save(step, args=orbax.checkpoint.args.StandardSave({"state": numpy.array(state)}))
    manager.wait_until_finished()


if __name__ == "__main__":
    done(run(load, save))

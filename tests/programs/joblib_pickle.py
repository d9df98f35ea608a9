"""`model.joblib`, which joblib rewrites in place, and which shows no end."""

from pathlib import Path

import joblib
import numpy
from tests.programs.training import Loaded, SlowFile, State, done, run


def load(output: Path) -> Loaded | None:
    path = output / "model.joblib"
    if not path.exists():
        return None
    step, state = joblib.load(path)
    return step, state.tolist()


def save(output: Path, step: int, state: State) -> None:
    with SlowFile(output / "model.joblib") as file:
        joblib.dump((step, numpy.array(state)), file)


if __name__ == "__main__":
    done(run(load, save))

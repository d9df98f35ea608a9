"""`model.ubj`, which XGBoost writes in place, beside `state.json`; both of one step."""

import json
from pathlib import Path

import numpy
import xgboost
from tests.programs.training import Loaded, State, as_json, done, from_json, run, work, write


def load(output: Path) -> Loaded | None:
    if not (output / "state.json").exists():
        return None
    step, state = from_json((output / "state.json").read_bytes())
    model = xgboost.Booster(model_file=output / "model.ubj")
    assert json.loads(model.attr("step")) == step, "model and state are of two steps"
    return step, state


def save(output: Path, step: int, state: State) -> None:
    data = xgboost.DMatrix(numpy.array(state).reshape(-1, 1), label=numpy.arange(len(state)))
    model = xgboost.train({"max_depth": 2, "nthread": 1}, data, num_boost_round=2)
    model.set_attr(step=str(step))
    model.save_model(output / "model.ubj")
    work("WRITE_SECONDS")
    write(output / "state.json", as_json(step, state))


if __name__ == "__main__":
    done(run(load, save))

"""Directories `checkpoint-N`, and at the end a `model.safetensors` beside them, as a framework's `save_model` gives."""

import json
import sys
from pathlib import Path

import numpy as np
import safetensors.numpy
from tests.programs.training import Loaded, State, as_zip, done, from_zip, newest, run, write


def load(output: Path) -> Loaded | None:
    checkpoint = newest(output, "checkpoint-*")
    if checkpoint is None:
        return None
    step = json.loads((checkpoint / "trainer_state.json").read_bytes())["global_step"]
    model = safetensors.numpy.load((checkpoint / "model.safetensors").read_bytes())
    assert int(model["step"][0]) == step, "the model is of another step"
    assert from_zip((checkpoint / "optimizer.pt").read_bytes())[0] == step, "the optimizer is of another step"
    return step, model["weights"].tolist()


def tensors(step: int, state: State) -> bytes:
    content: bytes = safetensors.numpy.save({"weights": np.array(state), "step": np.array([step])})
    return content


def save(output: Path, step: int, state: State) -> None:
    checkpoint = output / f"checkpoint-{step}"
    write(checkpoint / "model.safetensors", tensors(step, state))
    write(checkpoint / "optimizer.pt", as_zip(step, []))
    write(checkpoint / "trainer_state.json", json.dumps({"global_step": step}).encode())


if __name__ == "__main__":
    final = run(load, save)
    write(Path(sys.argv[1]) / "model.safetensors", tensors(int(sys.argv[2]), final))
    done(final)

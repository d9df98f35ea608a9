"""The training program of the fleet: fits a line by gradient descent, in Python alone.

It prints one JSON object for each step. With --output it knows nothing of Keepstep, and writes its checkpoints there.
"""

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import Final

import keepstep

_BATCH: Final = 32
_RATE: Final = 0.02
_SLOPE, _OFFSET, _NOISE = 3.0, -1.0, 0.2
_STATE_FILE: Final = "state.json"
_PADDING_FILE: Final = "padding.bin"


class Training:
    """The line so far and the step; `save` and `load` carry all of it across processes."""

    def __init__(self, state_kib: int) -> None:
        self.step = 0
        self._slope = self._offset = 0.0
        self._padding = bytes(1024 * state_kib)

    def train_one_step(self) -> float:
        """Train one step and return its loss. The batch follows from the step."""
        numbers = random.Random(self.step)
        gradient_slope = gradient_offset = loss = 0.0
        for _ in range(_BATCH):
            x = numbers.uniform(-1, 1)
            error = self._slope * x + self._offset - (_SLOPE * x + _OFFSET + numbers.gauss(0, _NOISE))
            loss += error * error / _BATCH
            gradient_slope += 2 * error * x / _BATCH
            gradient_offset += 2 * error / _BATCH
        self._slope -= _RATE * gradient_slope
        self._offset -= _RATE * gradient_offset
        self.step += 1
        return loss

    def save(self, directory: Path) -> None:
        (directory / _PADDING_FILE).write_bytes(self._padding)
        state = {"step": self.step, "slope": self._slope, "offset": self._offset}
        (directory / _STATE_FILE).write_text(json.dumps(state))

    def load(self, directory: Path) -> None:
        state = json.loads((directory / _STATE_FILE).read_text())
        self.step, self._slope, self._offset = state["step"], state["slope"], state["offset"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Fit a line.")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--save-every", type=int, required=True, help="steps")
    parser.add_argument("--step-seconds", type=float, default=0.0, help="how long a step takes")
    parser.add_argument("--state-kib", type=int, default=0, help="how large a checkpoint is")
    parser.add_argument("--fail-after", type=int, default=0, help="the step after which the program fails")
    parser.add_argument("--output", type=Path, help="save there, without Keepstep")
    arguments = parser.parse_args()
    training = Training(arguments.state_kib)
    if arguments.output:
        _train_plainly(training, arguments)
    else:
        _train_safely(training, arguments)


def _train_safely(training: Training, arguments: argparse.Namespace) -> None:
    checkpointer = keepstep.Checkpointer()
    if (path := checkpointer.resume()) is not None:
        training.load(path)
    while training.step < arguments.steps and not checkpointer.stopping:
        _train_one_step(training, arguments)
        last = training.step == arguments.steps
        if last or checkpointer.should_save(training.step, every=arguments.save_every):
            kind = keepstep.Kind.FINAL if last else None
            with checkpointer.save(training.step, kind=kind, units={"samples": training.step * _BATCH}) as directory:
                training.save(directory)
    checkpointer.finish()


def _train_plainly(training: Training, arguments: argparse.Namespace) -> None:
    found = sorted(arguments.output.glob(f"checkpoint-*/{_STATE_FILE}"), key=lambda path: path.stat().st_mtime)
    if found:
        training.load(found[-1].parent)
    while training.step < arguments.steps:
        _train_one_step(training, arguments)
        if training.step % arguments.save_every == 0:
            directory = arguments.output / f"checkpoint-{training.step}"
            directory.mkdir(parents=True, exist_ok=True)
            training.save(directory)


def _train_one_step(training: Training, arguments: argparse.Namespace) -> None:
    time.sleep(arguments.step_seconds)
    loss = training.train_one_step()
    print(json.dumps({"step": training.step, "loss": loss.hex()}), flush=True)
    if training.step == arguments.fail_after:
        sys.exit("error: the next batch cannot be read")


if __name__ == "__main__":
    main()

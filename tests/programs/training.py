"""What the programs beside this file have in common: a state that they train, a slow disk, and lines that say it.

A program is run as `python -m tests.programs.NAME OUTPUT_DIRECTORY STEPS`. It knows nothing of Keepstep. It prints
`resumed STEP` first, `saving STEP TIME` and `saved STEP TIME` around each save, and `done DIGEST` at the end, which
depends on the number of steps alone, however often the program was interrupted. How long its work takes is in its
environment: `STEP_SECONDS`, `WRITE_SECONDS` for each piece of a file, and `EVALUATION_SECONDS`, in which nothing is
written.
"""

import hashlib
import io
import json
import os
import struct
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

State = list[float]
Loaded = tuple[int, State]

SAVE_EVERY = 5
EVALUATE_EVERY = 20
PIECE_BYTES = 256
_SIZE = 48


def run(
    load: Callable[[Path], Loaded | None],
    save: Callable[[Path, int, State], None],
    *,
    on_step: Callable[[Path, int], None] = lambda output, step: None,
    say: Callable[..., None] = print,
) -> State:
    """Train to the last step from what `load` finds; return the final state."""
    output, steps = Path(sys.argv[1]), int(sys.argv[2])
    output.mkdir(parents=True, exist_ok=True)
    step, state = load(output) or (0, [index / 8 for index in range(_SIZE)])
    assert len(state) == _SIZE, "it is no state of this program"
    say("resumed", step, flush=True)
    while step < steps:
        step += 1
        state = trained(state, step)
        work("STEP_SECONDS")
        on_step(output, step)
        if step % SAVE_EVERY == 0 or step == steps:
            say("saving", step, time.time(), flush=True)
            save(output, step, state)
            say("saved", step, time.time(), flush=True)
        if step % EVALUATE_EVERY == 0:
            work("EVALUATION_SECONDS")
    return state


def done(state: State) -> None:
    print("done", digest(state), flush=True)


def work(name: str) -> None:
    time.sleep(float(os.environ.get(name, "0")))


def trained(state: State, step: int) -> State:
    return [value * 0.9375 + ((index + 1) * step % 17) / 16 for index, value in enumerate(state)]


def digest(state: State) -> str:
    return hashlib.sha256(struct.pack(f"<{len(state)}d", *state)).hexdigest()[:16]


class SlowFile(io.FileIO):
    """A new file on a disk on which each checkpoint takes as long as a large one. What exists is written in place."""

    def __init__(self, path: Path, mode: str = "wb") -> None:
        super().__init__(path, mode)

    def write(self, content: Any) -> int:
        view = memoryview(content).cast("B")
        for start in range(0, len(view), PIECE_BYTES):
            super().write(view[start : start + PIECE_BYTES])
            work("WRITE_SECONDS")
        return len(view)


def write(path: Path, content: bytes) -> None:
    """Write a file in place, piece by piece."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with SlowFile(path) as file:
        file.write(content)


def as_json(step: int, state: State) -> bytes:
    return json.dumps({"step": step, "state": state}).encode()


def from_json(content: bytes) -> Loaded:
    value = json.loads(content)
    return value["step"], value["state"]


def as_zip(step: int, state: State) -> bytes:
    """A zip, such as torch.save and Keras write, without the time that it takes to import them."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("archive/data.json", as_json(step, state))
        archive.writestr("archive/version", "3\n")
    return content.getvalue()


def from_zip(content: bytes) -> Loaded:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        assert archive.testzip() is None
        return from_json(archive.read("archive/data.json"))


def number_in(path: Path) -> int:
    """The number in a name: 10 of checkpoint-10, of step_00010.pt and of 00010."""
    return int("".join(character for character in path.stem if character.isdigit()))


def newest(output: Path, pattern: str) -> Path | None:
    """What programs resume from: the highest number in a name, whatever is inside."""
    return max(output.glob(pattern), key=number_in, default=None)

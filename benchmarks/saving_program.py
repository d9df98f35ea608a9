"""A program that knows nobody: it trains a while, writes a checkpoint of four files in place, and so on without an end.

    python -m benchmarks.saving_program DIRECTORY WRITE_SECONDS TRAIN_SECONDS

Prints `resumed STEP`, and `saved STEP` after each save. Writing takes WRITE_SECONDS, in pieces, as that of a large
checkpoint does. Two files have no format that shows an end, and one is a zip, as torch.save writes.
"""

import hashlib
import io
import json
import random
import sys
import time
import zipfile
from pathlib import Path
from typing import Final

SIZES: Final = {"model.pt": 300_000, "optimizer-0.bin": 200_000, "optimizer-1.bin": 200_000, "state.json": 1000}
CHECKPOINT_BYTES: Final = sum(SIZES.values())
_PIECES: Final = 20
_DIGEST_BYTES: Final = 32


class TornError(Exception):
    """What is in the directory is no checkpoint that was ever saved."""


def load(directory: Path) -> int:
    """Return the step of the checkpoint, 0 if there is none. Raises TornError."""
    present = [name for name in SIZES if (directory / name).exists()]
    if not present:
        return 0
    if len(present) < len(SIZES):
        raise TornError(f"only {', '.join(present)}")
    steps = {name: _step_in(name, (directory / name).read_bytes()) for name in SIZES}
    if len(set(steps.values())) > 1:
        raise TornError(f"a mix of steps: {steps}")
    return steps["state.json"]


def content_of(name: str, step: int) -> bytes:
    body = random.Random(f"{name} {step}").randbytes(SIZES[name])
    framed = step.to_bytes(8) + body
    framed = hashlib.sha256(framed).digest() + framed
    if name.endswith(".json"):
        return json.dumps({"step": step, "state": framed.hex()}).encode()
    if name.endswith(".pt"):
        archive = io.BytesIO()
        with zipfile.ZipFile(archive, "w") as file:
            file.writestr("archive/data.pkl", framed)
            file.writestr("archive/version", "3\n")
        return archive.getvalue()
    return framed


def _step_in(name: str, content: bytes) -> int:
    try:
        if name.endswith(".json"):
            content = bytes.fromhex(json.loads(content)["state"])
        elif name.endswith(".pt"):
            with zipfile.ZipFile(io.BytesIO(content)) as file:
                content = file.read("archive/data.pkl")
    except (ValueError, KeyError, zipfile.BadZipFile) as error:
        raise TornError(f"{name} cannot be loaded: {error}") from error
    digest, framed = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    if hashlib.sha256(framed).digest() != digest:
        raise TornError(f"{name} is not what was saved")
    return int.from_bytes(framed[:8])


def save(directory: Path, step: int, seconds: float) -> None:
    """Write the files in place, one after the other."""
    contents = {name: content_of(name, step) for name in SIZES}
    total_bytes = sum(map(len, contents.values()))
    for name, content in contents.items():
        with (directory / name).open("wb", buffering=0) as file:
            for start in range(0, len(content), total_bytes // _PIECES):
                file.write(content[start : start + total_bytes // _PIECES])
                time.sleep(seconds / _PIECES)


def main() -> None:
    directory, write_seconds, train_seconds = Path(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
    directory.mkdir(parents=True, exist_ok=True)
    step = load(directory)
    print("resumed", step, flush=True)
    while True:
        time.sleep(train_seconds)
        step += 1
        save(directory, step, write_seconds)
        print("saved", step, flush=True)


if __name__ == "__main__":
    main()

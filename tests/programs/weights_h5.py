"""`epoch-N.weights.h5`: HDF5 files, whose first block is written last and names their end."""

import struct
from pathlib import Path

from tests.programs.training import Loaded, SlowFile, State, as_json, done, from_json, newest, run

_BLOCK_BYTES = 96


def load(output: Path) -> Loaded | None:
    path = newest(output, "*.weights.h5")
    if path is None:
        return None
    content = path.read_bytes()
    assert content.startswith(b"\x89HDF\r\n\x1a\n"), "it is no HDF5 file"
    return from_json(content[_BLOCK_BYTES:])


def save(output: Path, step: int, state: State) -> None:
    content = as_json(step, state)
    with SlowFile(output / f"epoch-{step:03}.weights.h5") as file:
        file.seek(_BLOCK_BYTES)
        file.write(content)
        file.seek(0)
        file.write(first_block(_BLOCK_BYTES + len(content)))


def first_block(end: int) -> bytes:
    """The superblock, version 0, with addresses of eight bytes."""
    sizes = bytes([0, 0, 0, 0, 0, 8, 8, 0])
    addresses = struct.pack("<4Q", 0, 2**64 - 1, end, 2**64 - 1)
    return (b"\x89HDF\r\n\x1a\n" + sizes + struct.pack("<HHI", 4, 16, 0) + addresses).ljust(_BLOCK_BYTES, b"\0")


if __name__ == "__main__":
    done(run(load, save))

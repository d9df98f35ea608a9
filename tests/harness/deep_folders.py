"""Folders below each other, more of them than a path can name or a recursion can enter."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LEVELS = 3_000


@contextmanager
def deep_folders(top: Path, levels: int = LEVELS) -> Iterator[Path]:
    """`levels` folders below `top`, a file in the last; removed at the end, for pytest would recurse into them."""
    top.mkdir(parents=True, exist_ok=True)
    here = os.open(top, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for _ in range(levels):
            os.mkdir("d", dir_fd=here)
            below = os.open("d", os.O_RDONLY | os.O_DIRECTORY, dir_fd=here)
            os.close(here)
            here = below
        os.close(os.open("model.bin", os.O_WRONLY | os.O_CREAT, dir_fd=here))
        yield top
    finally:
        os.close(here)
        subprocess.run(["rm", "-rf", "--", top], check=True)

"""Links a checkpoint that a program has written outside the volume into it: no byte is copied."""

import os
from pathlib import Path


def may_link(folder: Path, volume: Path) -> bool:
    """Whether files in `folder`, which may not exist yet, lie on the volume's filesystem."""
    while not folder.exists():
        folder = folder.parent
    return folder.stat().st_dev == volume.stat().st_dev


def link_tree(checkpoint: Path, to: Path) -> None:
    """Link a file, or all files of a folder, to another name. Raises OSError."""
    if not checkpoint.is_dir():
        to.parent.mkdir(parents=True, exist_ok=True)
        os.link(checkpoint, to)
        return
    for parent, _, names in os.walk(checkpoint):
        folder = to / Path(parent).relative_to(checkpoint)
        folder.mkdir(parents=True, exist_ok=True)
        for name in names:
            os.link(Path(parent, name), folder / name)

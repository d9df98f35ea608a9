"""Folders that somebody else may remove at the same time, because a deletion left them empty."""

from pathlib import Path
from typing import Final

_RACES: Final = 64


def make_folder(folder: Path) -> None:
    """Make it with its parents; one that is there is fine. Raises OSError.

    `mkdir(exist_ok=True)` alone may find a folder there and then, asking whether it is one, nothing.
    """
    for _ in range(_RACES):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, FileNotFoundError):
            if folder.is_file():
                raise
        else:
            return
    folder.mkdir(parents=True, exist_ok=True)

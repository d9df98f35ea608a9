"""A file that exists before its content: a program finds it, and may rename it, before it is written."""

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class EmptyFile:
    """A file whose content is yet to come. `inode`: device and number, which it keeps when the program renames it."""

    path: Path
    inode: tuple[int, int]

    def find(self, root: Path) -> Path | None:
        """Return where it is by now; None if the program has removed or replaced it."""
        elsewhere = (path for path in root.rglob("*") if _inode(path) == self.inode)
        return self.path if _inode(self.path) == self.inode else next(elsewhere, None)


def make_empty(path: Path) -> EmptyFile:
    """Make an empty file, or empty the one that is there. Raises OSError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        found = os.fstat(descriptor)
    finally:
        os.close(descriptor)
    return EmptyFile(path=path, inode=(found.st_dev, found.st_ino))


def _inode(path: Path) -> tuple[int, int] | None:
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_dev, found.st_ino

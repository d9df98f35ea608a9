"""A watched directory as values: what was there at one look. Read by `adapters.volume.directory_scan`."""

import hashlib
from dataclasses import dataclass
from enum import StrEnum


class Proof(StrEnum):
    """What a file's own format says of its end."""

    WHOLE = "whole"
    BROKEN = "broken"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSnapshot:
    """One file as it was seen; `path` is relative to the candidate, with `/`.

    `names`: files beside it that it says belong to it, which DCP's metadata does.
    """

    path: str
    size_bytes: int
    mtime_ns: int
    inode: int
    proof: Proof
    names: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectorySnapshot:
    """A candidate: one entry of the watched directory with everything below it.

    A single file has itself as its only file. `folders` are relative too. `seen_at` is seconds of a steady clock.
    """

    name: str
    single_file: bool
    files: tuple[FileSnapshot, ...]
    folders: tuple[str, ...]
    seen_at: float

    @property
    def signature(self) -> str:
        """Changes whenever a name, a size, an mtime or an inode does; the same across restarts of the agent."""
        digest = hashlib.blake2b(self.name.encode(errors="surrogateescape"), digest_size=16)
        for file in sorted(self.files, key=lambda file: file.path):
            line = f"\0{file.path}\0{file.size_bytes}\0{file.mtime_ns}\0{file.inode}"
            digest.update(line.encode(errors="surrogateescape"))
        return digest.hexdigest()

    @property
    def newest_mtime_ns(self) -> int:
        return max((file.mtime_ns for file in self.files), default=0)

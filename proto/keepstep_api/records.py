"""Records: one small JSON file per local checkpoint that is complete, below `<volume>/.keepstep/records/`.

Owns the format, which client and `keepstep restore` write, and what tells one directory's checkpoints from another's.
The agent has a decoder of its own, because what the trainer writes is untrusted input there.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from hashlib import sha256
from typing import Any, Final

from keepstep_api.names import RECORD_FORMAT

SUFFIX: Final = ".json"
_BATCH: Final = 256
"""How many files are described at a time."""
CHECKPOINT_DIRECTORY: Final = ":"
"""As the output directory of a checkpoint in another folder: the run's checkpoint directory."""


def directory_key(directory: str) -> str:
    """Return what stands for a directory in names of files and keys of objects; empty for the checkpoint directory.

    `directory` is relative to the volume, and empty for the checkpoint directory.
    """
    return sha256(directory.encode(errors="surrogateescape")).hexdigest()[:12] if directory else ""


def belongs_to(directory: str, output: str) -> str:
    """Return the output directory that a checkpoint belongs to, which lies in `directory`; as for `directory_key`."""
    return "" if output == CHECKPOINT_DIRECTORY else output or directory


def record_file(directory: str, name: str) -> str:
    """Return the name of the file that is the record of a checkpoint. `directory` as for `directory_key`."""
    return f"{name}@{directory_key(directory)}{SUFFIX}" if directory else f"{name}{SUFFIX}"


class Kind(str, Enum):
    """Why a checkpoint was saved."""

    __str__ = str.__str__

    PERIODIC = "periodic"
    JUST_IN_TIME = "just-in-time"
    FINAL = "final"
    SNAPSHOT = "snapshot"
    """The state of an output directory, as the agent found it. Never in a client's record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedFile:
    """A file of a checkpoint. `path` is relative to it, with `/`, and empty when the checkpoint is that file."""

    path: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A complete local checkpoint. `saved_at` is unix seconds.

    `committed`: it came from the destination. `announced`: an agent has it. With neither, an agent that was unreachable
    takes it up by this record. `directory`: where it lies, relative to the volume; empty: in the checkpoint directory.
    `output`: the output directory that it belongs to, if that is another one, such as the one above a folder that is
    numbered anew at each start. `by_framework`: a framework wrote it, and Keepstep does not delete it. `ranks`: the
    ranks of this pod, whose parts it holds; empty in the record of a restored checkpoint. `others`: files of the
    program's own beside `files`, relative to the checkpoint, that belong to it as they are when an agent takes it; the
    program may write to them again. `inode`: of the checkpoint, by which it is found when the program has renamed it; 0
    if not known.
    """

    name: str
    step: int
    save: str
    kind: Kind
    world_size: int
    saved_at: float
    files: Sequence[RecordedFile]
    committed: bool = False
    announced: bool = False
    directory: str = ""
    output: str = ""
    by_framework: bool = False
    ranks: tuple[int, ...] = ()
    others: tuple[str, ...] = ()
    inode: int = 0

    @property
    def file_name(self) -> str:
        """The record's own name. Directories may have checkpoints of one name each."""
        return record_file(self.directory, self.name)

    @property
    def belongs_to(self) -> str:
        """The output directory that it belongs to, relative to the volume; empty: the checkpoint directory."""
        return belongs_to(self.directory, self.output)

    @property
    def order(self) -> tuple[int, float]:
        """Greater is newer: the step decides, then the time."""
        return self.step, self.saved_at

    def encode(self) -> bytes:
        return b"".join(self.pieces())

    def pieces(self) -> Iterator[bytes]:
        """Yield what `encode` returns in pieces, so that all of many files is never in memory."""
        begin = {
            "format": RECORD_FORMAT,
            "name": self.name,
            "step": self.step,
            "save": self.save,
            "kind": self.kind.value,
            "world_size": self.world_size,
            "saved_at": self.saved_at,
        }
        end: dict[str, Any] = {}
        if self.committed:
            end["committed"] = True
        if self.announced:
            end["announced"] = True
        if self.directory:
            end["directory"] = self.directory
        if self.output:
            end["output"] = self.output
        if self.by_framework:
            end["by_framework"] = True
        if self.ranks:
            end["ranks"] = list(self.ranks)
        if self.others:
            end["others"] = list(self.others)
        if self.inode:
            end["inode"] = self.inode
        # In ASCII, which can escape a file name that is not UTF-8.
        yield f'{json.dumps(begin)[:-1]}, "files": ['.encode()
        for first in range(0, len(self.files), _BATCH):
            described = [{"path": file.path, "size": file.size_bytes} for file in self.files[first : first + _BATCH]]
            yield f"{', ' if first else ''}{json.dumps(described)[1:-1]}".encode()
        yield f"]{', ' if end else ''}{json.dumps(end)[1:]}\n".encode()

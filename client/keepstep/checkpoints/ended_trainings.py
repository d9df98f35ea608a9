"""Which trainings have ended in this start of the run: the next program must not take their results for its own.

A start is one `keepstep run`, or one life of a container. `<volume>/.keepstep/records/<key>.ended` says, for an output
directory, in which start which program ended its training there. The same program may come again: its launcher has
started it anew, and it resumes where it was.
"""

import os
import sys
from hashlib import sha256
from pathlib import Path
from typing import Final

from keepstep.checkpoints.durable import write_durably
from keepstep_api import names
from keepstep_api.records import directory_key

_SUFFIX: Final = ".ended"


def note_end(records: Path, output: str, origin: Path) -> None:
    """Note that this program has ended its training of an output directory. Raises OSError.

    `output`: as records call it. `origin`: where it is. Two directories outside the volume may have one place in it.
    """
    start = _start()
    if start:
        records.mkdir(parents=True, exist_ok=True)
        said = (start, _program(), _process(os.getpid()), _digest(origin.absolute()))
        write_durably(_path(records, output), "\n".join(said).encode())


def ended_before(records: Path, output: str, origin: Path) -> bool:
    """Whether another program, or an earlier training of this process, has ended its training there in this start."""
    try:
        start, program, process, place = _path(records, output).read_text().split("\n")
        is_other = program != _program() or process == _process(os.getpid()) or place != _digest(origin.absolute())
        return start == _start() and is_other
    except (OSError, ValueError):
        return False


def _path(records: Path, output: str) -> Path:
    return records / f"{directory_key(output)}{_SUFFIX}"


def _program() -> str:
    return _digest(sys.argv)


def _digest(value: object) -> str:
    return sha256(repr(value).encode(errors="surrogateescape")).hexdigest()


def _start() -> str:
    """Return what identifies this start; empty if nothing tells one from another."""
    start = os.environ.get(names.ENV_START, "")
    if start != names.CONTAINER:
        return start
    pid = os.getpid()
    while (parent := int(_status(pid)[1])) > 0:
        pid = parent
    return _process(pid)


def _process(pid: int) -> str:
    """Return what tells a process from all others of this machine, also from later ones of its number."""
    return f"{pid}-{_status(pid)[19]}"


def _status(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the third one on: the state, the parent, …; the 20th is the start."""
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()

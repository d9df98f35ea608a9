"""Which training an output directory has in this start of the run: no other one may take its results for its own.

A start is one `keepstep run`, or one life of a container. `<volume>/.keepstep/records/<key>.training` says in which
start which program trains there, or has ended its training. The same program may come again: its launcher has started
it anew, and it resumes where it was. So may any program if the training was killed; one that names no directory counts
as ended from its begin.
"""

import os
import sys
from hashlib import sha256
from pathlib import Path
from typing import Final

from keepstep.checkpoints.durable import write_durably
from keepstep_api import names
from keepstep_api.records import directory_key

_SUFFIX: Final = ".training"
_TRAINS, _ENDED = "trains", "ended"


def note_training(records: Path, output: str, origin: Path, *, ended: bool) -> None:
    """Note that this program trains in an output directory, or has ended its training there. Raises OSError.

    `output`: as records call it. `origin`: where it is. Two directories outside the volume may have one place in it.
    """
    start = _start()
    if start:
        records.mkdir(parents=True, exist_ok=True)
        said = (start, _program(), _process(os.getpid()), _digest(origin.absolute()), _ENDED if ended else _TRAINS)
        write_durably(_path(records, output), "\n".join(said).encode())


def is_taken(records: Path, output: str, origin: Path) -> bool:
    """Whether another program trains there, or it or an earlier training of this process has ended there."""
    try:
        start, program, process, place, state = _path(records, output).read_text().split("\n")
        is_other = program != _program() or place != _digest(origin.absolute())
        is_own = process == _process(os.getpid())
        if start != _start():
            return False
        return is_other or is_own if state == _ENDED else is_other and not is_own and _lives(process)
    except (OSError, ValueError):
        return False


def _lives(process: str) -> bool:
    try:
        return _process(int(process.partition("-")[0])) == process
    except OSError:
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

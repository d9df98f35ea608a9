"""Where the trainer finds its volume, its checkpoints and its agent: arguments first, then the environment.

Owns which environment variables the client reads. If none is set, everything lies below one local directory and there
is no agent.
"""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from keepstep.errors import ErrorKind, UsageError
from keepstep.ranks.rank_store import Ranks
from keepstep_api import names

_log: Final = logging.getLogger("keepstep")
LOCAL_DIRECTORY: Final = "checkpoints"
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SWITCH: Final = {"true": True, "on": True, "1": True, "false": False, "off": False, "0": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Absolute paths. `socket` is None when no agent is configured. `ranks`: as the launcher says.

    `checkpoint_directory`: where this program saves. `run_directory`: where programs of the run save that name none.

    `lazy`: nothing was restored before this program, and the agent brings what it asks for. `watched`: directories in
    which the agent of the pod stores the program's files by itself. `asynchronous`: whether checkpoints are written
    while training continues; None if the environment leaves that to each framework's default. `in_pod`: this program is
    a container of a pod, where nobody types Ctrl-C.
    """

    volume: Path
    checkpoint_directory: Path
    run_directory: Path
    socket: Path | None
    lazy: bool = False
    watched: tuple[Path, ...] = ()
    asynchronous: bool | None = None
    in_pod: bool = False
    ranks: Ranks = field(default_factory=Ranks)

    @property
    def state_directory(self) -> Path:
        """Keepstep's own folder in the volume."""
        return self.volume / names.STATE_DIRECTORY

    @property
    def records_directory(self) -> Path:
        return self.state_directory / names.RECORDS_DIRECTORY


def read_settings(
    environment: Mapping[str, str],
    *,
    directory: str | Path | None = None,
    name: str | None = None,
    volume: str | Path | None = None,
    socket: str | Path | None = None,
) -> Settings:
    """Read the settings from the arguments, then from the environment. Raises UsageError.

    `name`: of one of several programs, which saves in a folder of its own in the run's checkpoint directory.
    """
    if name is not None and (directory is not None or not _NAME.fullmatch(name)):
        raise UsageError(
            ErrorKind.BAD_ARGUMENT,
            f"name is {name!r}" if directory is None else f"both a directory and the name {name!r} are given",
            hint="name a program with letters, digits and . _ - or give it a directory",
        )
    rank = _number(environment, ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK"), 0)
    ranks = Ranks(
        rank=rank,
        world_size=_number(environment, ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"), 1),
        # Any number that no other process of this pod has is enough.
        local_rank=_number(environment, ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"), rank),
    )
    asynchronous = _switch(environment, names.ENV_ASYNCHRONOUS_SAVES)
    volume = volume or environment.get(names.ENV_VOLUME)
    run_directory = environment.get(names.ENV_CHECKPOINT_DIRECTORY)
    socket = socket or environment.get(names.ENV_SOCKET)
    if not volume:
        # Write nothing outside the one directory that the user knows of.
        local = _absolute(directory or run_directory or LOCAL_DIRECTORY)
        return Settings(
            ranks=ranks,
            volume=local,
            checkpoint_directory=local / name if name else local,
            run_directory=local,
            asynchronous=asynchronous,
            socket=_absolute(socket) if socket else None,
        )
    root = _absolute(volume)
    default = _absolute(run_directory) if run_directory else root / names.CHECKPOINT_DIRECTORY
    checkpoint_directory = _absolute(directory) if directory else default / (name or "")
    if not checkpoint_directory.is_relative_to(root):
        _log.warning(
            "not uploaded, the directory lies outside the volume: directory=%s volume=%s", checkpoint_directory, root
        )
    return Settings(
        ranks=ranks,
        volume=root,
        checkpoint_directory=checkpoint_directory,
        run_directory=default,
        lazy=environment.get(names.ENV_RESTORE) == names.LAZY,
        watched=tuple(map(Path, filter(None, environment.get(names.ENV_WATCHED, "").split(":")))),
        asynchronous=asynchronous,
        in_pod=environment.get(names.ENV_START) == names.CONTAINER,
        socket=_absolute(socket) if socket else root / names.STATE_DIRECTORY / names.SOCKET,
    )


def _absolute(path: str | Path) -> Path:
    try:
        absolute = Path(path).absolute()
        str(absolute).encode()
    except UnicodeEncodeError as error:
        raise UsageError(ErrorKind.BAD_ARGUMENT, f"{str(path)!r} is not UTF-8", hint="rename the directory") from error
    except OSError as error:
        raise UsageError(
            ErrorKind.BAD_ARGUMENT,
            f"{str(path)!r} is relative to a directory that is gone",
            hint="give an absolute path",
        ) from error
    if "\0" in str(absolute):
        raise UsageError(ErrorKind.BAD_ARGUMENT, f"{str(path)!r} is not a path", hint="leave out the NUL character")
    return absolute


def _switch(environment: Mapping[str, str], name: str) -> bool | None:
    """Return what a variable says; None if it is not set. Raises UsageError."""
    value = environment.get(name)
    if not value:
        return None
    if value.lower() not in _SWITCH:
        raise UsageError(ErrorKind.BAD_ARGUMENT, f"{name} is {value!r}", hint="use true or false")
    return _SWITCH[value.lower()]


def _number(environment: Mapping[str, str], spellings: tuple[str, ...], default: int) -> int:
    """Return the first variable that is a number: torchrun's and DeepSpeed's, Open MPI's, MPICH's."""
    values = (environment.get(name, "") for name in spellings)
    return next((int(value) for value in values if value.isdecimal()), default)

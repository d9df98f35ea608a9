"""One run for each volume: a file that is locked for as long as `keepstep run` uses it."""

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

import structlog

from keepstep_agent.adapters.volume.own_entries import RUN_LOCK
from keepstep_agent.adapters.volume.shared_folders import limit_own_folder, make_state_directory, open_state_directory
from keepstep_agent.core.errors import ErrorKind, KeepstepError
from keepstep_agent.core.settings.values import Settings

_HOLDER_BYTES: Final = 1024

log = structlog.get_logger("keepstep.agent")


@contextmanager
def held_volume(settings: Settings) -> Iterator[None]:
    """Hold the volume for one `keepstep run` while the context is, also against other nodes that mount it.

    Two runs on one volume would announce to one agent, and each would resume from what the other saved. Raises
    KeepstepError if another run holds the volume, or if the state directory cannot be made.
    """
    volume, state_directory = Path(settings.volume), Path(settings.state_directory)
    make_state_directory(volume, state_directory)
    with suppress(OSError):
        limit_own_folder(volume, to_owner=True)
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(open_state_directory(volume, state_directory))
            _lock(stack.enter_context(folder.opened_file(RUN_LOCK, os.O_RDWR | os.O_CREAT)), volume)
        except OSError as error:
            # Some shared filesystems have no locks, and a full volume is no reason not to train.
            log.warning("volume.not_locked", error=str(error), hint="let no other run use this volume meanwhile")
        yield


def _lock(descriptor: int, volume: Path) -> None:
    """Lock the open file, and note in it by whom. Raises OSError, and KeepstepError if another run holds the lock."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.pread(descriptor, _HOLDER_BYTES, 0).decode(errors="replace").strip()
        raise KeepstepError(
            ErrorKind.BAD_CONFIGURATION,
            f"another `keepstep run` uses the volume {volume}" + (f": {holder}" if holder else ""),
            hint="wait until it has ended, or give each run a volume of its own with --volume; Slurm's tasks that run "
            "at the same time have one each if no volume is given",
        ) from error
    with suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

"""The volume as the agent takes it at its start: writable, this destination's, with room set aside, its journal open.

What a volume that is full, damaged or another run's means for the start is decided here; it knows nothing of serving.
"""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import structlog

from mooring_agent.adapters.journal import open_journal
from mooring_agent.adapters.volume import identity
from mooring_agent.adapters.volume.reserve import Reserve
from mooring_agent.core.errors import ErrorKind, VolumeError
from mooring_agent.ports import Journal
from mooring_api.names import JOURNAL, STATE_DIRECTORY

log = structlog.get_logger("mooring.agent")


def take_volume(volume: Path, destination: str) -> Path:
    """The state directory of a volume that is ours from now on; MooringError where it cannot be."""
    state_directory = _make_state_directory(volume)
    identity.claim(volume, destination)
    return state_directory


@contextmanager
def opened_journal(state_directory: Path) -> Iterator[Journal]:
    """Open while the context is; a damaged one has been set aside for a new one."""
    Reserve(state_directory).keep()
    journal, was_damaged = open_journal(state_directory / JOURNAL)
    try:
        if was_damaged:
            log.error("journal.damaged", action="set aside; the staged directories are rescanned")
        yield journal
    finally:
        journal.close()


def _make_state_directory(volume: Path) -> Path:
    """A full volume is no reason to stay away: somebody has to make room on it."""
    state_directory = volume / STATE_DIRECTORY
    try:
        state_directory.mkdir(parents=True, exist_ok=True)
        probe = state_directory / f".writable-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        if error.errno == errno.ENOSPC and state_directory.is_dir():
            return state_directory
        raise VolumeError(
            ErrorKind.VOLUME_UNUSABLE,
            f"cannot write to the volume {volume}: {error.strerror}",
            hint="mount the volume read-write for the user that the agent runs as, and leave it some room",
        ) from error
    return state_directory

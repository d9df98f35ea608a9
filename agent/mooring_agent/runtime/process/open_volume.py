"""The volume as the agent takes it at its start: writable, this destination's, with room set aside, its journal open.

What a volume that is full, damaged or another run's means for the start is decided here; it knows nothing of serving.
"""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import structlog

from mooring_agent.adapters.journal import open_journal
from mooring_agent.adapters.volume import identity
from mooring_agent.adapters.volume.disk import Reserve
from mooring_agent.adapters.volume.shared_folders import make_own_folder, make_state_directory
from mooring_agent.adapters.volume.shared_volume import open_volume
from mooring_agent.core.errors import ErrorKind, VolumeError
from mooring_agent.core.settings.values import Settings
from mooring_agent.ports import Journal
from mooring_api.names import JOURNAL, STATE_DIRECTORY

_PROBE: Final = f"{STATE_DIRECTORY}/.writable"

log = structlog.get_logger("mooring.agent")


def take_volume(settings: Settings) -> None:
    """The volume is ours from now on, and there is a place for our own state; MooringError where it cannot be."""
    assert settings.state_directory, "the settings lack the state directory, which is the volume's by default"
    volume = Path(settings.volume)
    _require_writable(volume)
    identity.claim(volume, settings.store.destination)
    make_state_directory(volume, Path(settings.state_directory))


@contextmanager
def opened_journal(settings: Settings) -> Iterator[Journal]:
    """Open while the context is; a damaged one has been set aside for a new one."""
    reserve = Reserve(Path(settings.volume))
    reserve.keep()
    journal, was_damaged = open_journal(Path(settings.state_directory) / JOURNAL, reserve)
    try:
        if was_damaged:
            log.error("journal.damaged", action="set aside; the staged directories are rescanned")
        yield journal
    finally:
        journal.close()


def _require_writable(volume: Path) -> None:
    """A full volume is no reason to stay away: somebody has to make room on it."""
    try:
        volume.mkdir(parents=True, exist_ok=True)
        with open_volume(volume) as root:
            make_own_folder(root).close()
            root.unlink(_PROBE)
            with root.opened_file(_PROBE, os.O_WRONLY | os.O_CREAT | os.O_EXCL):
                root.unlink(_PROBE)
    except OSError as error:
        if error.errno == errno.ENOSPC and (volume / STATE_DIRECTORY).is_dir():
            return
        raise VolumeError(
            ErrorKind.VOLUME_UNUSABLE,
            f"cannot write to the volume {volume}: {error.strerror}",
            hint="mount the volume read-write for the user that the agent runs as, and leave it some room",
        ) from error

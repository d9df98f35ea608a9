"""Opens the volume at the start: no other run may use it, it must be writable and the destination's.

Keeps a reserve and opens the journal. Decides what a full volume, a damaged journal or another run's volume means for
the start, and which termination notices are void. Knows nothing of serving.
"""

import errno
import os
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final

import structlog

from keepstep_agent.adapters.journal import open_journal
from keepstep_agent.adapters.signal_file import SignalFile
from keepstep_agent.adapters.volume import identity
from keepstep_agent.adapters.volume.disk import Reserve
from keepstep_agent.adapters.volume.own_entries import WRITE_PROBE
from keepstep_agent.adapters.volume.shared_folders import (
    VOLUME_MODE,
    limit_own_folder,
    make_state_directory,
)
from keepstep_agent.adapters.volume.shared_volume import open_volume
from keepstep_agent.core.errors import ErrorKind, VolumeError
from keepstep_agent.core.settings.values import Settings
from keepstep_agent.ports import Journal
from keepstep_api.names import JOURNAL, STATE_DIRECTORY

_PROBE: Final = f"{STATE_DIRECTORY}/{WRITE_PROBE}"

log = structlog.get_logger("keepstep.agent")


def claim_volume(settings: Settings, *, alone: bool = False) -> None:
    """Claim the volume for the destination and make the agent's state directory. Raises KeepstepError if it cannot.

    `alone`: the trainer is of the same user, so nobody else has business in `.keepstep`.
    """
    assert settings.state_directory, "the settings lack the state directory, which is the volume's by default"
    volume = Path(settings.volume)
    _require_writable(volume, alone=alone)
    identity.claim(volume, settings.store.destination)
    make_state_directory(volume, Path(settings.state_directory))


def void_notices(settings: Settings) -> None:
    """Void the termination notices that earlier agents left in the journal and the signal file. Blocks.

    Restore calls it: in a pod, restore runs before the agent and trainers start, and not again if only the agent is
    restarted. Raises VolumeError or OSError; voids nothing if an agent is running.
    """
    state_directory = Path(settings.state_directory)
    make_state_directory(Path(settings.volume), state_directory)
    if (state_directory / JOURNAL).exists():
        # Imported here, because training waits for restore, and a new pod has no journal.
        from keepstep_agent.core.agent.events import Exited
        from keepstep_agent.runtime.engine.event_codec import encode_event

        with volume_journal(settings) as journal:
            journal.append([encode_event(Exited(at=time.time()))])
    SignalFile(Path(settings.volume)).forget_termination()


@contextmanager
def volume_journal(settings: Settings) -> Iterator[Journal]:
    """Keep the journal open while the context is. A damaged one is moved aside, and a new one begun."""
    reserve = Reserve(Path(settings.volume))
    reserve.keep()
    journal, was_damaged = open_journal(Path(settings.state_directory) / JOURNAL, reserve)
    with closing(journal):
        if was_damaged:
            log.error("journal.damaged", action="moved aside; the staged directories are rescanned")
        yield journal


def _require_writable(volume: Path, *, alone: bool) -> None:
    """Raise VolumeError if the volume cannot be written. One that is merely full passes: the agent makes room on it."""
    try:
        volume.mkdir(VOLUME_MODE, parents=True, exist_ok=True)
        limit_own_folder(volume, to_owner=alone)
        with open_volume(volume) as root:
            root.unlink(_PROBE)
            with root.opened_file(_PROBE, os.O_WRONLY | os.O_CREAT | os.O_EXCL):
                root.unlink(_PROBE)
    except OSError as error:
        if error.errno == errno.ENOSPC and (volume / STATE_DIRECTORY).is_dir():
            return
        raise VolumeError(
            ErrorKind.VOLUME_UNUSABLE,
            f"cannot write to the volume {volume}: {error.strerror}",
            hint="mount the volume read-write for the agent's user, and make sure that it has free space",
        ) from error

"""Records which destination a volume belongs to, that of its journal, its pins and its records; and which volume it is.

A volume can outlive its run and be used by another one. Neither run may upload or resume what the other saved.
Invariant: the recorded destination is never replaced.

The file lies on the volume because it must live as long as the volume. A trainer that rewrites it harms only itself:
its checkpoints are not stored, or they are stored where its agent stores them anyway.
"""

import contextlib
import secrets
from pathlib import Path
from typing import Final

from keepstep_agent.adapters.volume.errors import folder_error
from keepstep_agent.adapters.volume.shared_folders import (
    VOLUME_MODE,
    make_own_folder,
    make_state_directory,
    open_state_directory,
)
from keepstep_agent.adapters.volume.shared_volume import open_volume
from keepstep_agent.core.errors import ErrorKind, KeepstepError
from keepstep_agent.core.limits import OWNER_BYTES
from keepstep_api.names import ANNOTATION_PREFIX, OWNING_DESTINATION, STATE_DIRECTORY, VOLUME_IDENTITY

_PATH: Final = f"{STATE_DIRECTORY}/{OWNING_DESTINATION}"
_ID_CHARACTERS: Final = 32


def claim(volume: Path, destination: str) -> None:
    """Record `destination` as the volume's, if none is recorded yet.

    Raises BAD_CONFIGURATION if the volume belongs to another one, and VolumeError if it cannot be read or written.
    """
    wanted = destination.rstrip("/")
    owner = owner_of(volume)
    if owner is None:
        _write(volume, wanted)
        # Two processes, such as a restore and an agent, may claim it at once: the first wins.
        owner = owner_of(volume)
    if owner != wanted:
        raise KeepstepError(
            ErrorKind.BAD_CONFIGURATION,
            f"the volume {volume} belongs to {owner}, not to {wanted}",
            hint=f"use another --volume (in a pod {ANNOTATION_PREFIX}checkpoint-directory), "
            f"or the destination {owner}; or empty the volume if you no longer need anything on it",
        )


def owner_of(volume: Path) -> str | None:
    """Return the destination that the volume belongs to, or None. Raises VolumeError if it cannot be read."""
    try:
        with open_volume(volume) as root:
            return root.read(_PATH, OWNER_BYTES).decode(errors="replace").strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise folder_error(error, f"cannot read {volume}/{_PATH}") from error


def volume_id(volume: Path, state_directory: Path) -> str:
    """Return a word that no other volume has, made by the first call. Raises VolumeError.

    The run's lock keeps out other processes that would make one.
    """
    make_state_directory(volume, state_directory)
    try:
        with open_state_directory(volume, state_directory) as folder:
            with contextlib.suppress(FileNotFoundError):
                return folder.read(VOLUME_IDENTITY, _ID_CHARACTERS).decode("ascii", errors="replace")
            made = secrets.token_hex(_ID_CHARACTERS // 2)
            folder.write_durably(VOLUME_IDENTITY, made.encode())
            return made
    except OSError as error:
        raise folder_error(error, f"cannot keep {state_directory}/{VOLUME_IDENTITY}") from error


def _write(volume: Path, destination: str) -> None:
    aside = f"{OWNING_DESTINATION}-{secrets.token_hex(8)}"
    try:
        volume.mkdir(VOLUME_MODE, parents=True, exist_ok=True)
        with open_volume(volume) as root, make_own_folder(root) as folder:
            folder.write_durably(aside, f"{destination}\n".encode())
            try:
                with folder.opened_file(aside) as descriptor:
                    folder.link_open_file(descriptor, OWNING_DESTINATION)
            except FileExistsError:
                pass  # another process was first
            except OSError:
                folder.rename(aside, folder, OWNING_DESTINATION)  # a filesystem without hard links: the last wins
            finally:
                folder.unlink(aside)
            folder.sync()
    except OSError as error:
        raise folder_error(error, f"cannot write {volume}/{_PATH}") from error

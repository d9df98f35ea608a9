"""Whose volume this is: the destination that its journal, its pins and its records belong to, written down once.

A volume that outlives a run may meet another one, and neither may send or resume what the other saved. Invariant: what
is written is never replaced.

It lies on the volume, because it must live as long: a trainer that rewrites it keeps its own checkpoints from being
stored, or has them stored where its agent stores them anyway.
"""

import secrets
from pathlib import Path
from typing import Final

from mooring_agent.adapters.volume.errors import folder_error
from mooring_agent.adapters.volume.shared_folders import make_own_folder
from mooring_agent.adapters.volume.shared_volume import open_volume
from mooring_agent.core.errors import ErrorKind, MooringError
from mooring_agent.core.limits import OWNER_BYTES
from mooring_api.names import OWNING_DESTINATION, STATE_DIRECTORY

_PATH: Final = f"{STATE_DIRECTORY}/{OWNING_DESTINATION}"


def claim(volume: Path, destination: str) -> None:
    """Make the volume this destination's, if it is nobody's yet.

    Raises BAD_CONFIGURATION when it is another one's, and VolumeError when it cannot be read or written.
    """
    wanted = destination.rstrip("/")
    owner = owner_of(volume)
    if owner is None:
        _write(volume, wanted)
        # Of two that claim it at once, a restore and an agent perhaps, the first keeps it.
        owner = owner_of(volume)
    if owner != wanted:
        raise MooringError(
            ErrorKind.BAD_CONFIGURATION,
            f"the volume {volume} holds checkpoints of {owner}, and not of {wanted}",
            hint=f"give another --volume, or the destination {owner}; "
            "or remove the volume's content when nothing on it is needed any more",
        )


def owner_of(volume: Path) -> str | None:
    """The destination that the volume belongs to; None if it is nobody's yet. VolumeError when it cannot be read."""
    try:
        with open_volume(volume) as root:
            return root.read(_PATH, OWNER_BYTES).decode(errors="replace").strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise folder_error(error, f"cannot read {volume}/{_PATH}") from error


def _write(volume: Path, destination: str) -> None:
    aside = f"{OWNING_DESTINATION}-{secrets.token_hex(8)}"
    try:
        volume.mkdir(parents=True, exist_ok=True)
        with open_volume(volume) as root, make_own_folder(root) as folder:
            folder.write_durably(aside, f"{destination}\n".encode())
            try:
                with folder.opened_file(aside) as descriptor:
                    folder.link_open_file(descriptor, OWNING_DESTINATION)
            except FileExistsError:
                pass  # somebody else was first
            except OSError:
                folder.rename(aside, folder, OWNING_DESTINATION)  # a filesystem without hard links: the last keeps it
            finally:
                folder.unlink(aside)
            folder.sync()
    except OSError as error:
        raise folder_error(error, f"cannot write {volume}/{_PATH}") from error

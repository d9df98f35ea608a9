"""Whose volume this is: the destination that its journal, its pins and its records belong to, written down once.

A volume that outlives a run may meet another one, and neither may send or resume what the other saved. Invariant: what
is written is never replaced.
"""

import secrets
from pathlib import Path

from mooring_agent.adapters.volume.durable_files import sync_folder, write_durably
from mooring_agent.adapters.volume.errors import folder_error
from mooring_agent.core.errors import ErrorKind, MooringError
from mooring_api.names import OWNING_DESTINATION, STATE_DIRECTORY


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
    path = volume / STATE_DIRECTORY / OWNING_DESTINATION
    try:
        return path.read_text(errors="replace").strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise folder_error(error, f"cannot read {path}") from error


def _write(volume: Path, destination: str) -> None:
    path = volume / STATE_DIRECTORY / OWNING_DESTINATION
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f"{path.name}-{secrets.token_hex(8)}")
        write_durably(aside, f"{destination}\n".encode())
        try:
            path.hardlink_to(aside)
        except FileExistsError:
            pass  # somebody else was first
        except OSError:
            aside.rename(path)  # a filesystem without hard links: the last keeps it
        finally:
            aside.unlink(missing_ok=True)
        sync_folder(path.parent)
    except OSError as error:
        raise folder_error(error, f"cannot write {path}") from error

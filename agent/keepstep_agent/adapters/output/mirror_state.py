"""Reads and writes what the mirror remembers, in the state directory that agent and restore share.

`mirror.json` is the base of the next snapshot. `announced.json` has the paths that a client has announced or was about
to announce: snapshots leave them out, even if the client died before they were complete.

All functions block. What cannot be read counts as missing: then the next snapshot sends everything.
"""

from pathlib import Path
from typing import Annotated

import msgspec
import structlog

from keepstep_agent.adapters.volume.own_entries import ANNOUNCED_PATHS
from keepstep_agent.adapters.volume.shared_folders import open_state_directory
from keepstep_agent.core.limits import FILES_PER_RANK, RECORD_BYTES, PathText
from keepstep_agent.core.mirror.base import BASE_FILE, BASE_FILE_BYTES, MirrorBase, decode_base, encode_base
from keepstep_agent.core.stored.checked_json import UndecodableError

_Paths = Annotated[frozenset[PathText], msgspec.Meta(max_length=FILES_PER_RANK)]

log = structlog.get_logger("keepstep.mirror")


def read_base(volume: Path, state_directory: Path) -> MirrorBase:
    """Return the base; an empty one if this volume has none."""
    try:
        with open_state_directory(volume, state_directory) as state:
            return decode_base(state.read(BASE_FILE, BASE_FILE_BYTES))
    except FileNotFoundError:
        return MirrorBase()
    except (OSError, UndecodableError) as error:
        log.warning("mirror.base_unreadable", error=str(error), hint="the next snapshot sends everything")
        return MirrorBase()


def write_base(volume: Path, state_directory: Path, base: MirrorBase) -> None:
    """Replace the base, durably. Raises OSError."""
    with open_state_directory(volume, state_directory) as state:
        state.write_durably(BASE_FILE, encode_base(base))


def read_announced(volume: Path, state_directory: Path) -> frozenset[str]:
    try:
        with open_state_directory(volume, state_directory) as state:
            return msgspec.json.decode(state.read(ANNOUNCED_PATHS, RECORD_BYTES), type=_Paths)
    except (OSError, ValueError, RecursionError):
        return frozenset()


def write_announced(volume: Path, state_directory: Path, paths: frozenset[str]) -> None:
    """Replace the announced paths, durably. Raises OSError."""
    with open_state_directory(volume, state_directory) as state:
        state.write_durably(ANNOUNCED_PATHS, msgspec.json.encode(sorted(paths)))

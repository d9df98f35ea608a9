"""Which save this volume was resumed from, by what restore leaves in the agent's state directory."""

from pathlib import Path

import msgspec

from mooring_agent.adapters.volume.shared_volume import open_volume
from mooring_agent.core.limits import RECORD_BYTES
from mooring_api.names import RESUMED


class _Resumed(msgspec.Struct):
    save: str


def resumed_from(state_directory: Path) -> str:
    """Save id of the checkpoint that the last restore chose; empty when there is none."""
    try:
        with open_volume(state_directory) as folder:
            return msgspec.json.decode(folder.read(RESUMED, RECORD_BYTES), type=_Resumed).save
    except (OSError, ValueError, RecursionError):
        # A record that cannot be read says nothing.
        return ""

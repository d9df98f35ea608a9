"""Which save this volume was resumed from, by what restore leaves in the agent's state directory."""

import json
from pathlib import Path

from mooring_agent.adapters.volume.shared_volume import open_volume
from mooring_agent.core.limits import RECORD_BYTES
from mooring_api.names import RESUMED


def resumed_from(state_directory: Path) -> str:
    """Save id of the checkpoint that the last restore chose; empty when there is none."""
    try:
        with open_volume(state_directory) as folder:
            return str(json.loads(folder.read(RESUMED, RECORD_BYTES))["save"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        # A record that cannot be read says nothing.
        return ""

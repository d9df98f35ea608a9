"""Which save this volume was resumed from, by what restore leaves in the agent's state directory."""

import json
from pathlib import Path

from mooring_api.names import RESUMED


def resumed_from(state_directory: Path) -> str:
    """Save id of the checkpoint that the last restore chose; empty when there is none."""
    try:
        return str(json.loads((state_directory / RESUMED).read_bytes())["save"])
    except (OSError, ValueError, KeyError, TypeError):
        # A record that cannot be read says nothing.
        return ""

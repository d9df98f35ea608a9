"""Which save this volume was resumed from, by the record that restore leaves (`mooring.records` has the format)."""

import json
from pathlib import Path

from mooring_api.names import RESUMED, STATE_DIRECTORY


def resumed_from(volume: Path) -> str:
    """Save id of the checkpoint that the last restore chose; empty when there is none."""
    try:
        return str(json.loads((volume / STATE_DIRECTORY / RESUMED).read_bytes())["save"])
    except (OSError, ValueError, KeyError, TypeError):
        # A record that cannot be read says nothing.
        return ""

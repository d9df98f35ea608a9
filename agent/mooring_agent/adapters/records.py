"""Which save this volume was resumed from, by the records that restore leaves (`mooring.records` has the format)."""

import json
from pathlib import Path

from mooring_api.names import RECORDS_DIRECTORY, STATE_DIRECTORY


def resumed_from(volume: Path) -> str:
    """Save id of the newest checkpoint that came from the destination; empty when there is none."""
    newest: tuple[int, float, str] | None = None
    for path in (volume / STATE_DIRECTORY / RECORDS_DIRECTORY).glob("*.json"):
        try:
            record = json.loads(path.read_bytes())
            if record["committed"]:
                candidate = (int(record["step"]), float(record["saved_at"]), str(record["save"]))
                newest = max(newest or candidate, candidate)
        except (OSError, ValueError, KeyError, TypeError):
            # A record that cannot be read says nothing; restore and the client each report it.
            continue
    return newest[2] if newest else ""

"""What a process of this volume is about to announce, as the agent reads it."""

import json
import subprocess
from pathlib import Path

from tests.harness.bounds import HANG_SECONDS

from keepstep_api.names import RANKS_DIRECTORY, STATE_DIRECTORY


def claims(volume: Path, local_rank: int = 0) -> list[str]:
    """By another process: where the test holds the lock itself, reading the file here would drop it."""
    path = volume / STATE_DIRECTORY / RANKS_DIRECTORY / str(local_rank)
    content = subprocess.run(["cat", str(path)], capture_output=True, check=True, timeout=HANG_SECONDS).stdout
    claimed: list[str] = json.loads(content) if content else []
    return claimed

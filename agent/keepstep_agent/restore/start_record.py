"""What restore leaves on the volume for the agent that starts after it: when it ran, and what it put in place.

The agent notes it in the run's ledger. It decides nothing: a record that is missing or unreadable costs figures alone.
"""

import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec
import structlog

from keepstep_agent.adapters.volume.own_entries import START_RECORD
from keepstep_agent.adapters.volume.shared_folders import make_state_directory, open_state_directory
from keepstep_agent.core.errors import KeepstepError
from keepstep_agent.core.limits import Moment, NameText, Step
from keepstep_agent.core.stored.ledger import Resumed

_BYTES: Final = 64 * 1024

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRecord:
    """One restore on this volume. `start` tells it from all others; the times are unix seconds.

    `step` and `save` are those of what it put in place, if `resumed` is `save`.
    """

    began_at: Moment
    restored_at: Moment
    resumed: Resumed
    step: Step = 0
    save: NameText = ""
    start: NameText = field(default_factory=lambda: secrets.token_hex(8))


def write_start_record(record: StartRecord, volume: Path, state_directory: Path) -> None:
    """Write the record in place of the last one. Blocks. A failure is only logged."""
    try:
        make_state_directory(volume, state_directory)
        with open_state_directory(volume, state_directory) as folder:
            folder.write_durably(START_RECORD, msgspec.json.encode(record))
    except (OSError, KeepstepError) as error:
        _log.warning("start.not_recorded", error=str(error), hint="the run's report lacks this restore")


def read_start_record(volume: Path, state_directory: Path) -> StartRecord | None:
    """Return the record of the last restore on this volume; None if there is none that can be read. Blocks."""
    try:
        with open_state_directory(volume, state_directory) as folder:
            return msgspec.json.decode(folder.read(START_RECORD, _BYTES), type=StartRecord)
    except (OSError, ValueError, RecursionError):
        return None

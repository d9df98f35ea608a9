"""The log of work that failed: the first of a kind at once, then one line for many, so that no outage fills a disk."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import structlog

from mooring_agent.core.errors import ErrorKind, MooringError
from mooring_agent.core.work import WorkId

_QUIET_SECONDS: Final = 5.0

log = structlog.get_logger("mooring.dispatcher")


@dataclass(slots=True)
class _Seen:
    logged_at: float
    suppressed: int = 0


class FailureLog:
    """One line per kind of error and five seconds at most; each says how many of its kind were not told before it."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._seen: dict[ErrorKind, _Seen] = {}

    def failed(self, work: WorkId, error: MooringError) -> None:
        now = self._monotonic()
        seen = self._seen.get(error.kind)
        if seen is not None and now - seen.logged_at < _QUIET_SECONDS:
            seen.suppressed += 1
            return
        log.warning(
            "work.failed",
            operation=work.operation.value,
            save=work.save,
            rank=work.rank,
            path=work.path,
            part=work.number,
            kind=error.kind.value,
            error=str(error),
            hint=error.hint,
            suppressed=seen.suppressed if seen is not None else 0,
        )
        self._seen[error.kind] = _Seen(logged_at=now)

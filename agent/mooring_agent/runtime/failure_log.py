"""The log of what failed or was refused: the first at once, and no line per try, so that no outage fills a disk."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import structlog

from mooring_agent.core.errors import ErrorKind, MooringError
from mooring_agent.core.model import Kind
from mooring_agent.core.work import WorkId

_QUIET_SECONDS: Final = 5.0
_REFUSALS_KEPT: Final = 64

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


class RefusalLog:
    """One line for each save that was given no leave, however often its trainer asks."""

    def __init__(self) -> None:
        self._told: deque[tuple[str, int]] = deque(maxlen=_REFUSALS_KEPT)

    def refused(self, attempt: str, step: int, kind: Kind, reason: str) -> None:
        if (attempt, step) in self._told:
            return
        self._told.append((attempt, step))
        log.warning(
            "save.refused",
            step=step,
            attempt=attempt,
            kind=kind.value,
            reason=reason,
            hint="training goes on without this checkpoint: raise the volume's size or sizeLimit, or save less often",
        )

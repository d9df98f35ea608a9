"""When a periodic save is due: every so many steps, or after a duration.

The caller passes the step and the clock's reading. Steps are counted the same way on all ranks; a duration is measured
on rank 0 alone, which then asks all ranks to save. Also warns about calls by which nothing is ever saved.
"""

import logging
import re
from datetime import timedelta
from functools import lru_cache
from typing import Any, Final, TypeAlias

from keepstep.errors import ErrorKind, UsageError

Interval: TypeAlias = int | str | timedelta
"""A number of steps (0: no periodic saves), or a duration as "90s", "10m", "1.5h" or a timedelta."""

_log: Final = logging.getLogger("keepstep")
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([smh])")
_UNITS: Final = {"s": "seconds", "m": "minutes", "h": "hours"}
_SHORTEST: Final = timedelta(seconds=1)
_REPEATED_CALLS: Final = 1000
_UNSAVED_CALLS: Final = 3


def parse_interval(every: Interval) -> int | timedelta:
    """Return the interval as steps, which may also be a NumPy number, or as a duration. Raises UsageError."""
    interval = _parse_text(every) if isinstance(every, str) else every
    if isinstance(interval, timedelta):
        if interval >= _SHORTEST:
            return interval
    elif interval == (steps := _whole_number(interval)) and steps >= 0:
        return steps
    raise UsageError(
        ErrorKind.BAD_ARGUMENT,
        "`every` is neither a number of steps nor a duration of at least a second",
        hint='use steps, as every=100, or a duration, as every="10m" (s, m or h)',
    )


def parse_objective(recovery_point: str | timedelta, max_overhead: float) -> timedelta:
    """Return the recovery point. Raises UsageError if it is no duration, or if the overhead is no share."""
    interval = parse_interval(recovery_point)
    if not isinstance(interval, timedelta):
        raise UsageError(
            ErrorKind.BAD_ARGUMENT,
            f"recovery_point is {recovery_point!r}, which is no duration",
            hint='use recovery_point="10m" (s, m or h)',
        )
    if not 0 <= max_overhead <= 1:
        raise UsageError(
            ErrorKind.BAD_ARGUMENT,
            f"max_overhead is {max_overhead!r}",
            hint="give a share of the training's time from 0 to 1, such as 0.01",
        )
    return interval


@lru_cache(maxsize=16)
def _parse_text(every: str) -> int | timedelta:
    if every.isascii() and every.isdecimal():
        return int(every)
    found = _DURATION.fullmatch(every.strip())
    try:
        return timedelta(**{_UNITS[found[2]]: float(found[1])}) if found else -1
    except OverflowError:
        return -1


def _whole_number(value: Any) -> int:
    """Return the number without its fraction; -1 for what is no number."""
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        return -1


class SaveSchedule:
    """What `should_save` was called with so far, by one process. `now` is in seconds, of any monotonic clock."""

    def __init__(self, now: float) -> None:
        self._timer_began_at = now
        self._step: int | None = None
        self._previous: int | None = None
        self._saved: int | None = None
        self._repeated = 0
        self._said_repeated = False
        self._told_to_save_at: int | None = None
        self._unsaved = 0

    def at(self, step: int) -> None:
        """Note the step of this call. Warns once when the program's counter does not move."""
        if step != self._step:
            self._previous, self._step, self._repeated = self._step, step, 0
            return
        self._repeated += 1
        if self._repeated >= _REPEATED_CALLS and not self._said_repeated:
            self._said_repeated = True
            _log.warning(
                "should_save was called %d times for the same step: step=%d hint=pass a counter that grows with each "
                "optimizer step, else no periodic save is ever due",
                _REPEATED_CALLS,
                step,
            )

    def is_due(self, every: int) -> bool:
        """Whether the step is the first one at or past a multiple of `every`, and is not saved yet."""
        step = self._step
        if every < 1 or step is None or step < 1 or step == self._saved:
            return False
        # The first call of a run that resumed comes after the step that it resumed from.
        before = step - 1 if self._saved is None else self._saved
        previous = before if self._previous is None else self._previous
        return step // every > previous // every

    def timer_expired(self, every: timedelta, now: float) -> bool:
        """Whether `every` has passed since the timer began; if so it begins anew."""
        if now - self._timer_began_at < every.total_seconds():
            return False
        self._timer_began_at = now
        return True

    def told_to_save(self) -> None:
        """`should_save` is about to return true. Warns when that was so at several steps, and nothing was saved."""
        if self._step == self._told_to_save_at:
            return
        self._told_to_save_at = self._step
        self._unsaved += 1
        if self._unsaved == _UNSAVED_CALLS:
            _log.warning(
                "should_save was true %d times and nothing was saved: hint=when it is true, write the checkpoint in "
                "`with checkpointer.save(step) as directory:`",
                _UNSAVED_CALLS,
            )

    def saved(self, step: int, now: float) -> None:
        """The program saves `step`, or resumes from it."""
        self._saved = step
        self._unsaved = 0
        self._timer_began_at = now

"""Places a run's starts, saves, commits and notices on lanes of one time axis, in thousandths of its length."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from keepstep_agent.core.model import Kind
from keepstep_agent.core.policies.run_overview import RunDetails, StartRow

WIDTH: Final = 1000
_LEAST_WIDTH: Final = 2.0
"""What is shorter would not be seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A bar, or a moment if it is narrow. `look` is a class of the style sheet."""

    look: str
    x: float
    width: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """The marks of one kind of event. `says` is for who does not see it."""

    name: str
    marks: tuple[Mark, ...]
    says: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Unix seconds, and the lanes between them."""

    since: float
    until: float
    lanes: tuple[Lane, ...]


def timeline_of(details: RunDetails, *, running_at: float | None) -> Timeline | None:
    """Return the timeline of what `details` has; None if there is nothing.

    `running_at`: the last start still runs at this moment.
    """
    saves = details.checkpoints
    starts = list(details.starts)
    if running_at is not None and starts and not starts[-1].ended:
        starts[-1] = _until(starts[-1], running_at)
    moments = [start.began_at for start in starts] or [row.taken_at for row in saves]
    ends = [start.ended_at for start in starts] + [row.committed_at or row.taken_at for row in saves]
    if not moments:
        return None
    since, until = min(moments), max(ends)
    axis = _Axis(since, until)
    shown = [row for row in saves if row.taken_at >= since]
    commits = [row for row in shown if row.committed_at is not None]
    notices = [at for start in starts for at in start.noticed_at]
    return Timeline(
        since=since,
        until=until,
        lanes=(
            Lane(
                name="Starts",
                marks=tuple(mark for start in starts for mark in _marks_of(start, axis)),
                says=_counted(len(starts), "start"),
            ),
            Lane(
                name="Saves",
                marks=tuple(
                    axis.moment("jit" if row.kind == Kind.JUST_IN_TIME else "save", row.taken_at) for row in shown
                ),
                says=_counted(len(shown), "save"),
            ),
            Lane(
                name="Commits",
                marks=tuple(axis.moment("commit", row.committed_at) for row in commits if row.committed_at),
                says=_counted(len(commits), "commit"),
            ),
            Lane(
                name="Notices",
                marks=tuple(axis.moment("notice", at) for at in notices),
                says=_counted(len(notices), "termination notice"),
            ),
        ),
    )


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _until(start: StartRow, now: float) -> StartRow:
    trained = (*start.trained[:-1], (start.trained[-1][0], now)) if start.trained else ()
    return replace(start, ended_at=max(start.ended_at, now), trained=trained)


class _Axis:
    def __init__(self, since: float, until: float) -> None:
        self._since = since
        self._seconds = max(1.0, until - since)

    def bar(self, look: str, since: float, until: float) -> Mark:
        left, right = self._x(since), self._x(until)
        return Mark(look=look, x=min(left, WIDTH - _LEAST_WIDTH), width=round(max(_LEAST_WIDTH, right - left), 1))

    def moment(self, look: str, at: float) -> Mark:
        return self.bar(look, at, at)

    def _x(self, at: float) -> float:
        return round(min(1.0, max(0.0, (at - self._since) / self._seconds)) * WIDTH, 1)


def _marks_of(start: StartRow, axis: _Axis) -> Iterator[Mark]:
    """Yield a start's restore, the wait for its ranks, its training, and its drain, the last on top."""
    yield axis.bar("drain" if start.trained else "start", start.began_at, start.ended_at)
    first = start.trained[0][0] if start.trained else start.ended_at
    yield axis.bar("start", start.restored_at, first)
    if start.restored_at > start.began_at:
        yield axis.bar("restore", start.began_at, start.restored_at)
    for since, until in start.trained:
        yield axis.bar("training", since, until)

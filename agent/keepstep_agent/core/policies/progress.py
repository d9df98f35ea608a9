"""How far the trainers are, how fast they go, and whether they are stuck, by the steps that they tell.

Nothing is known of trainers that tell no steps: they never count as stuck. All ranks pass the same steps, so the newest
sign of any rank counts for all: while rank 0 evaluates and the others wait for it, the training goes on.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Final, NamedTuple

_WINDOW_SECONDS: Final = 60.0
_SIGNS_KEPT: Final = 64


class StepSign(NamedTuple):
    """A rank was at `step` then, in unix seconds of the agent's clock. It may be at a batch of an evaluation there."""

    at: float
    step: int


@dataclass(slots=True)
class Progress:
    """The steps of the trainers that are alive."""

    stuck: bool = False
    """Whether they were stuck when somebody last looked."""
    _signs: deque[StepSign] = field(default_factory=lambda: deque(maxlen=_SIGNS_KEPT))

    @property
    def newest(self) -> StepSign | None:
        """The newest sign; None while no live trainer tells its steps."""
        return self._signs[-1] if self._signs else None

    def note(self, sign: StepSign | None) -> None:
        """Take the newest sign of all live ranks; None: none of them tells its step."""
        newest = self.newest
        if sign is None or (newest is not None and sign.step < newest.step):
            # Other trainers, or the same ones from an earlier checkpoint on.
            self._signs.clear()
        if sign is None or sign == self.newest:
            return
        self._signs.append(sign)
        # One sign before the window stays, so that steps of minutes have a rate too.
        while len(self._signs) > 2 and self._signs[1].at <= sign.at - _WINDOW_SECONDS:
            self._signs.popleft()

    def age_seconds(self, now: float) -> float | None:
        """Return how long ago the newest sign was; None while there is none."""
        return None if self.newest is None else max(0.0, now - self.newest.at)

    def steps_per_second(self, now: float) -> float:
        """Return the rate of about the last minute, saves and evaluations included; 0 while it is not known."""
        if len(self._signs) < 2:
            return 0.0
        first, last = self._signs[0], self._signs[-1]
        overdue_seconds = max(0.0, now - last.at - max(_WINDOW_SECONDS, last.at - first.at))
        elapsed_seconds = last.at - first.at + overdue_seconds
        return (last.step - first.step) / elapsed_seconds if elapsed_seconds > 0 else 0.0

    def is_stuck(self, now: float, timeout_seconds: float) -> bool:
        """Return whether there was no sign for so long; never with a time-out of 0."""
        age_seconds = self.age_seconds(now)
        return bool(timeout_seconds) and age_seconds is not None and age_seconds >= timeout_seconds

"""A circuit breaker for the store: while the store as a whole is unavailable, one request at a time probes it.

Owns that judgement and the pauses between probes; knows nothing of what is sent. A single failure among successes
concerns only its own request. Two in a row without an answer in between mean that the store is unavailable ("away"),
unless the store answers both times, with an error about the same piece of work.
Then one request goes out after each pause. Every piece of work has its turn, so that one that always fails does not
hide that the others would succeed.
"""

from dataclasses import dataclass, field
from typing import Final

from keepstep_agent.core.agent.work import STAYS_HERE, WorkId
from keepstep_agent.core.errors import ErrorKind, retry_delay_seconds

_FAILURES_THAT_ARE_THE_STORES: Final = 2
_LONGEST_PAUSE_SECONDS: Final = 5.0
_LONGEST_PAUSE_WHILE_ENDING_SECONDS: Final = 0.5
# After this time another request may probe the store, even if the last one has neither failed nor succeeded.
_PATIENCE_SECONDS: Final = 10.0
_PATIENCE_WHILE_ENDING_SECONDS: Final = 1.0

STORE_WIDE: Final = frozenset(
    {
        ErrorKind.UNREACHABLE,
        ErrorKind.TIMED_OUT,
        ErrorKind.STORE_FAILED,
        ErrorKind.ACCESS_DENIED,
        ErrorKind.BUCKET_MISSING,
        ErrorKind.CLOCK_SKEWED,
        ErrorKind.STORE_FULL,
        ErrorKind.BAD_CONFIGURATION,
    }
)
"""Failures that every other request will probably meet too. SlowDown is not one of them: it narrows the window."""


@dataclass(slots=True)
class CircuitBreaker:
    """Times are unix seconds.

    `next_at`: when the next request may go out while the store is unavailable. `opened_at`: since when it has been so.
    """

    next_at: float = 0.0
    opened_at: float = 0.0
    _failures_in_a_row: int = 0
    _last_failed: WorkId | None = None
    _pauses: int = 0
    _asking: WorkId | None = None
    # Work that failed during this outage and waits until all other work had its turn.
    _had_their_turn: set[WorkId] = field(default_factory=set)

    @property
    def is_open(self) -> bool:
        """Whether the store as a whole is unavailable."""
        return self._failures_in_a_row >= _FAILURES_THAT_ARE_THE_STORES

    def lets_out(self, work: WorkId, now: float) -> bool:
        """Whether the breaker lets a piece of work begin."""
        if work.operation in STAYS_HERE or not self.is_open:
            return True
        return now >= self.next_at and work not in self._had_their_turn

    def begins(self, work: WorkId, now: float, *, ending: bool) -> None:
        if self.is_open and work.operation not in STAYS_HERE:
            self._asking = work
            self.next_at = now + (_PATIENCE_WHILE_ENDING_SECONDS if ending else _PATIENCE_SECONDS)

    def failed(self, work: WorkId, kind: ErrorKind, jitter: float, now: float, *, ending: bool) -> None:
        """Count a failure.

        Requests that were in flight when the outage began fail too. They do not lengthen the pause.
        """
        if work.operation in STAYS_HERE or kind not in STORE_WIDE:
            return
        was_open = self.is_open
        if not was_open and kind is ErrorKind.STORE_FAILED and work == self._last_failed:
            return
        self._failures_in_a_row += 1
        self._last_failed = work
        if not self.is_open:
            return
        self._had_their_turn.add(work)
        if not was_open:
            self.opened_at = now
        if not was_open or work == self._asking:
            self._pauses += 1
            longest_seconds = _LONGEST_PAUSE_WHILE_ENDING_SECONDS if ending else _LONGEST_PAUSE_SECONDS
            pause_seconds = retry_delay_seconds(kind, self._pauses, jitter) or longest_seconds
            self.next_at = now + min(longest_seconds, pause_seconds)

    def next_round(self, now: float) -> bool:
        """Give all work another turn if a probe is due and none went out. Returns whether it did so."""
        if not self.is_open or now < self.next_at or not self._had_their_turn:
            return False
        self._had_their_turn.clear()
        return True

    def is_over(self) -> None:
        """End the outage: the store has answered, or the outage does not matter any more."""
        self._failures_in_a_row = self._pauses = 0
        self._asking = self._last_failed = None
        self._had_their_turn.clear()

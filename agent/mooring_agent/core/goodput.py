"""Measured upload rate: bytes made durable per second of being busy, with old seconds fading out.

Bytes show only when a part lands, and parts land in bursts, so time counts when bytes come: a wait no longer than
twice the usual one says nothing yet, a longer one lowers the rate.
"""

from dataclasses import dataclass
from typing import Final

_HALF_LIFE_SECONDS: Final = 10.0
_TELLING_SECONDS: Final = 2.0


@dataclass(slots=True)
class Goodput:
    """Updated on every event; idle time does not count."""

    _bytes: float = 0.0
    _seconds: float = 0.0
    _waiting_seconds: float = 0.0
    _usual_wait_seconds: float = 0.0
    _last_at: float = 0.0

    def note(self, at: float, *, was_busy: bool, stored_bytes: int) -> None:
        """Time has moved to `at`; `was_busy`: something was on the wire since the last call."""
        self._waiting_seconds += max(0.0, at - self._last_at) if was_busy else 0.0
        self._last_at = at
        if stored_bytes:
            faded = _faded(self._waiting_seconds)
            self._bytes, self._seconds = self._after(self._waiting_seconds)
            self._bytes += stored_bytes
            self._usual_wait_seconds = max(self._waiting_seconds, self._usual_wait_seconds * faded)
            self._waiting_seconds = 0.0

    def forget(self) -> None:
        """What was measured holds no longer."""
        self._bytes = self._seconds = self._waiting_seconds = self._usual_wait_seconds = 0.0

    @property
    def bytes_per_second(self) -> float:
        """0 while nothing was measured."""
        overdue_seconds = max(0.0, self._waiting_seconds - 2 * self._usual_wait_seconds)
        size_bytes, seconds = self._after(overdue_seconds)
        return size_bytes / seconds if seconds > 0 else 0.0

    @property
    def wire_bytes_per_second(self) -> float:
        """The same once it says something of the wire, else 0: a few small files tell how long requests take."""
        return self.bytes_per_second if self._seconds >= _TELLING_SECONDS else 0.0

    def _after(self, elapsed_seconds: float) -> tuple[float, float]:
        """Bytes and seconds after more busy time in which nothing landed."""
        faded = _faded(elapsed_seconds)
        return self._bytes * faded, self._seconds * faded + elapsed_seconds


def _faded(elapsed_seconds: float) -> float:
    return float(0.5 ** (elapsed_seconds / _HALF_LIFE_SECONDS))

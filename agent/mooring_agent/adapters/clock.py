"""The agent's line of time: unix seconds that only ever go forward, one second per second.

The wall clock is read once, when the agent starts; from there on the monotonic clock counts. So a clock that is set
right while the agent runs (NTP after a boot, a resumed machine) makes no retry wait for hours, no deadline pass early
and no rate absurd. What it costs: times in the journal, the status and the manifests are off by what the wall clock
was off at the start. Nothing that must be right depends on that: graces and clouds' notices come in as seconds, not as
moments.
"""

import time
from collections.abc import Callable


class SystemClock:
    """`ports.Clock` of this machine."""

    def __init__(
        self, *, wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._monotonic = monotonic
        self._offset_seconds = wall() - monotonic()

    def now(self) -> float:
        return self._offset_seconds + self._monotonic()

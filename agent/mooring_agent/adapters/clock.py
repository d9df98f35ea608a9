"""The agent's clock: unix seconds that never jump or go back.

The wall clock is read once, when the agent starts; after that the monotonic clock counts. So if the wall clock is
corrected while the agent runs (NTP after a boot, a resumed machine), no retry waits for hours, no deadline passes early
and no rate becomes absurd. The cost is that times in the journal, the status and the manifests keep the wall clock's
error at the start. Nothing critical depends on them: grace periods and clouds' notices arrive as durations in seconds,
not as points in time.
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

"""A real agent for which idle time passes at once, to count how often it wakes: `python -m tests.harness.hurried_agent
agent …`. After a minute of its own time it prints how many of its timers fired, and ends.

Time is skipped only when nothing has happened for a moment, so a machine that is slow makes it wake less often in its
own time, and never more.
"""

import asyncio
import json
import os
import selectors
import sys
from collections.abc import Coroutine
from typing import Any, Final

import uvloop

from keepstep_agent.__main__ import main

_PATIENCE_SECONDS: Final = 0.03
_LIFE_SECONDS: Final = 60.0


class _HurriedSelector(selectors.DefaultSelector):
    """Waits for a moment where it should wait for long, and knows how much it left out."""

    skipped_seconds = 0.0
    timers_fired = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout <= _PATIENCE_SECONDS:
            self.timers_fired += bool(timeout)
            return super().select(timeout)
        ready = super().select(_PATIENCE_SECONDS)
        if not ready:
            self.timers_fired += 1
            self.skipped_seconds += timeout - _PATIENCE_SECONDS
            if self.skipped_seconds >= _LIFE_SECONDS:
                sys.stdout.write(json.dumps({"seconds": self.skipped_seconds, "wakes": self.timers_fired}))
                sys.stdout.flush()
                os._exit(0)
        return ready


class _HurriedLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._hurried = _HurriedSelector()
        super().__init__(self._hurried)

    def time(self) -> float:
        return super().time() + self._hurried.skipped_seconds


def _run(work: Coroutine[Any, Any, int]) -> int:
    with asyncio.Runner(loop_factory=_HurriedLoop) as runner:
        return runner.run(work)


if __name__ == "__main__":
    uvloop.run = _run  # type: ignore[assignment]
    main()

"""Says in a file of 32 bytes which step this rank is at, for the agent's metrics and for its eye on stuck trainers.

Costs a step a look at the clock, and once a second one write of fixed size. Nothing here raises.
"""

import atexit
import logging
import os
import time
from pathlib import Path
from typing import Final

from keepstep.operating_system import HAS_AGENTS
from keepstep_api import step_file
from keepstep_api.step_file import Leaving, StepRecord

_BETWEEN_WRITES_SECONDS: Final = 1.0
_log: Final = logging.getLogger("keepstep")


class StepFile:
    """The step file of one rank. Only the process that holds the rank's liveness lock may have one."""

    def __init__(self, path: Path | None) -> None:
        """`path`: None if nobody reads it. What an earlier process wrote is void."""
        self._descriptor = -1
        self._write_at = 0.0
        self._step: int | None = None
        if path is None or not HAS_AGENTS:
            return
        try:
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o660)
        except OSError as error:
            _log.debug("steps are not told: path=%s error=%s", path, error)

        # Of a process that ends in the midst of training, the agent is to know where.
        atexit.register(self.cut_short)

    def tell(self, step: int) -> None:
        """Say that this rank is at `step` and alive, unless it was said less than a second ago."""
        now = time.monotonic()
        self._step = step
        if now >= self._write_at:
            self._write_at = now + _BETWEEN_WRITES_SECONDS
            self._write(step)

    def _write(self, step: int, leaving: Leaving | None = None) -> None:
        if self._descriptor < 0:
            return
        try:
            # A step may be a NumPy or a torch number.
            content = step_file.encode(StepRecord(step=int(step), at_unix=time.time(), leaving=leaving))
            os.pwrite(self._descriptor, content, 0)
        except Exception as error:
            # A full volume, a step that is no number: training has its own ways to meet that.
            _log.debug("step not told: step=%s error=%s", step, error)

    def end(self) -> None:
        """Say that the training has ended. Idempotent, as the next two are, and only the first of the three counts."""
        if self._descriptor < 0:
            return
        try:
            os.ftruncate(self._descriptor, 0)
        except OSError as error:
            _log.debug("end of the steps not told: error=%s", error)
        self._close()

    def leave(self, leaving: Leaving) -> None:
        """Say that this process leaves for a termination notice, at a step that is stored or not."""
        self._write(self._step or 0, leaving)
        self._close()

    def cut_short(self) -> None:
        """Say that the training is not over and that its step is not stored."""
        if self._step is not None:
            self._write(self._step)
        self._close()

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            atexit.unregister(self.cut_short)
            os.close(descriptor)

"""The gate of a job with one process: this process, at its next step.

It is asked in every step, so it costs about a microsecond: no lock and no system call.
"""

from pathlib import Path

from mooring.gate.ask import Ask, Position
from mooring.gate.bell import Bell
from mooring.gate.sigterm import Sigterm


class SingleProcessGate:
    """Sources: SIGTERM, the doorbell, `notice`."""

    def __init__(self, doorbell_path: Path, sigterm: Sigterm) -> None:
        self._bell = Bell(doorbell_path)
        self._sigterm = sigterm
        self._stop = self._bell.rung_before_start()
        self._save_asked = False
        self._save_at: Position | None = None

    def at(self, step: int, tick: int = 0) -> Ask:
        ring = self._bell.new_ring()
        if ring is not None:
            self._stop |= ring.terminating
            self._save_asked |= not ring.terminating
        if self.noticed:
            return Ask.STOP
        if self._save_asked:
            self._save_asked = False
            self._save_at = (step, tick)
        return Ask.SAVE if (step, tick) == self._save_at else Ask.NOTHING

    @property
    def noticed(self) -> bool:
        return self._stop or self._sigterm.received

    def notice(self) -> None:
        self._stop = True

    def close(self) -> None:
        self._bell.close()

"""The agent's time is one line: forward, whatever is done to the wall clock."""

from keepstep_agent.runtime.process.app import SystemClock


class _Machine:
    def __init__(self) -> None:
        self.unix_seconds = 1_700_000_000.0
        self.uptime_seconds = 50.0

    def passes(self, seconds: float) -> None:
        self.unix_seconds += seconds
        self.uptime_seconds += seconds

    def clock(self) -> SystemClock:
        return SystemClock(wall=lambda: self.unix_seconds, monotonic=lambda: self.uptime_seconds)


def test_time_begins_at_the_wall_clock_and_passes_with_it() -> None:
    machine = _Machine()
    clock = machine.clock()
    assert clock.now() == 1_700_000_000.0
    machine.passes(1.5)
    assert clock.now() == 1_700_000_001.5


def test_a_wall_clock_that_is_set_moves_nothing() -> None:
    machine = _Machine()
    clock = machine.clock()
    for jump_seconds in (3600.0, -7200.0):
        before = clock.now()
        machine.unix_seconds += jump_seconds
        machine.passes(1.0)
        assert clock.now() == before + 1.0

"""News of the pod's end, and that it was spared after all: what they change in what we know and who is told.

Owns `State.termination`. When to leave is `drain.py`'s.
"""

from collections.abc import Iterator

from mooring_agent.core import drain
from mooring_agent.core.commands import Command, LiftBandwidthCap, RingDoorbell, TakeBackNotice
from mooring_agent.core.events import TerminationNoticed
from mooring_agent.core.outcome import hurry
from mooring_agent.core.state import State, Termination


def lapse(state: State) -> Iterator[Command]:
    """A notice that nobody followed up is void, and the pod goes on as before it."""
    lapses_at = drain.lapses_at(state)
    if lapses_at is not None and lapses_at <= state.now:
        state.termination = Termination(first_sequence=state.next_sequence)
        if state.live:
            yield TakeBackNotice()


def termination_noticed(state: State, event: TerminationNoticed) -> Iterator[Command]:
    termination = state.termination
    first = not termination.noticed
    earlier = event.deadline is not None and (termination.deadline is None or event.deadline < termination.deadline)
    if earlier:
        termination.deadline = event.deadline
    if first:
        termination.noticed, termination.source = True, event.source
        termination.most_alive = len(state.alive_ranks)
        hurry(state)
        if state.settings.transfer.bandwidth_bytes_per_second:
            # It was the cap's, and by it nothing would fit before the deadline that now does.
            state.goodput.forget()
        yield LiftBandwidthCap()
    if first or earlier:
        yield RingDoorbell(terminating=True, deadline=drain.deadline(state) or 0.0)

"""Whose turn it is to commit a save, so that one agent lists and writes however many there are.

The agent with rank 0 is the committer: it lists the manifests until all are there. The others only read the marker,
with pauses that grow. In case the committer has died, the next ones in line list too, each half as often as the one
before, and write the marker if a second listing finds every rank and still no marker. The place of an agent in this
line is its lowest rank divided by the ranks that it has: the number of agents before it, as far as it can know. Agents
that are further behind list seldom, only to send again what the store has lost of theirs.

A wrong guess costs requests and nothing else: whoever writes the marker writes the same bytes (docs/design/0015).
"""

from typing import Final

from keepstep_agent.core.agent import drain
from keepstep_agent.core.agent.checkpoint import Checkpoint
from keepstep_agent.core.agent.commands import Turn
from keepstep_agent.core.agent.events import CommitWaits
from keepstep_agent.core.agent.state import State
from keepstep_agent.core.agent.work import Operation, WorkId

_DEPUTIES: Final = 8
"""So many agents after the committer may write the marker."""
_DEPUTY_SECONDS: Final = 1.0
"""The pause between the listings of the first of them; it doubles from one to the next."""
_COMMITTER_SHARE_OF_WAIT: Final = 0.1
_READER_SHARE_OF_WAIT: Final = 0.2
"""A pause is this share of the time waited so far, within the bounds below. All wait for the committer: it pauses
less."""
_COMMITTER_PAUSE_SECONDS: Final = (0.1, 1.0)
_READER_PAUSE_SECONDS: Final = (1.0, 30.0)
_COMMITTER_ENDING_SECONDS: Final = 0.5
"""The longest pauses while the pod ends."""
_READER_ENDING_SECONDS: Final = 1.0


def place(checkpoint: Checkpoint) -> int:
    """Return the agent's place in line; 0 is the committer's."""
    return -(-min(checkpoint.contributions) // len(checkpoint.contributions))


def begin(state: State, checkpoint: Checkpoint) -> None:
    """Our ranks are sealed: the committer tries at once, the others give it a moment."""
    checkpoint.sealed_at = state.now
    checkpoint.all_listed = False
    checkpoint.lists_at = state.now + _listing_pause_seconds(checkpoint)
    work = WorkId(Operation.COMMIT, checkpoint.info.save)
    checkpoint.delayed.pop(work, None)
    if place(checkpoint):
        _delay(state, checkpoint, work)


def turn(state: State, checkpoint: Checkpoint) -> Turn:
    own = place(checkpoint)
    if own == 0:
        return Turn.WRITE
    if state.now < _lists_at(state, checkpoint):
        return Turn.READ
    is_deputy = own <= _DEPUTIES
    return Turn.WRITE if is_deputy and (checkpoint.all_listed or _is_last_chance(state)) else Turn.LIST


def wait(state: State, checkpoint: Checkpoint, event: CommitWaits) -> None:
    """A try to commit has ended without a marker: say when the next one is due."""
    checkpoint.waits_for_others = True
    if event.missing_ranks is not None:
        checkpoint.all_listed = event.missing_ranks == 0
        checkpoint.lists_at = state.now + _listing_pause_seconds(checkpoint)
    _delay(state, checkpoint, event.work)


def _delay(state: State, checkpoint: Checkpoint, work: WorkId) -> None:
    own = place(checkpoint)
    least, most = _READER_PAUSE_SECONDS if own else _COMMITTER_PAUSE_SECONDS
    share = _READER_SHARE_OF_WAIT if own else _COMMITTER_SHARE_OF_WAIT
    if state.termination.noticed:
        most = _READER_ENDING_SECONDS if own else _COMMITTER_ENDING_SECONDS
    pause_seconds = min(most, max(least, share * (state.now - checkpoint.sealed_at)))
    until = state.now + pause_seconds
    lists_at = _lists_at(state, checkpoint)
    # Within the last chance every try lists, so only the pause counts.
    state.delay(checkpoint, work, min(until, lists_at) if own and lists_at > state.now else until)


def _listing_pause_seconds(checkpoint: Checkpoint) -> float:
    return _DEPUTY_SECONDS * 2.0 ** (min(max(place(checkpoint), 1), _DEPUTIES + 1) - 1)


def _lists_at(state: State, checkpoint: Checkpoint) -> float:
    last_chance = _last_chance_at(state)
    if last_chance is None or place(checkpoint) > _DEPUTIES:
        return checkpoint.lists_at
    return min(checkpoint.lists_at, last_chance)


def _is_last_chance(state: State) -> bool:
    last_chance = _last_chance_at(state)
    return last_chance is not None and state.now >= last_chance


def _last_chance_at(state: State) -> float | None:
    """Return when a deputy whose pod ends can no longer wait for its turn (unix seconds)."""
    until = drain.deadline(state) if state.termination.noticed else None
    return None if until is None else until - state.settings.termination.commit_reserve_seconds

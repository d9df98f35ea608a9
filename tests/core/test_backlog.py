"""A store that was away for a day leaves a thousand checkpoints: an event costs no more than with a few."""

from collections.abc import Iterator
from time import process_time

import pytest
from tests.core.play import PART_BYTES, Play

from mooring_agent.core import planner
from mooring_agent.core.commands import Command
from mooring_agent.core.events import Committed
from mooring_agent.core.model import Phase
from mooring_agent.core.state import Checkpoint, State
from mooring_agent.core.work import Operation

_EVENTS = 100


def _with_backlog(count: int, *, files: int = 2) -> Play:
    play = Play()
    for number in range(count):
        play.announce(f"s{number}", (PART_BYTES,) * files)
    return play


def _seconds_per_event(play: Play) -> float:
    """The middle one of many: what else the machine does counts little."""
    taken = []
    for _ in range(_EVENTS):
        work = next(work for work in play.in_flight if work.operation is not Operation.STAGE)
        begun = process_time()
        play.answer(work)
        planner.next_wake(play.state)
        taken.append(process_time() - begun)
    return sorted(taken)[_EVENTS // 2]


def test_an_event_costs_about_the_same_whatever_waits_behind_it() -> None:
    assert _seconds_per_event(_with_backlog(1_000)) < 5 * _seconds_per_event(_with_backlog(50))


def test_an_event_looks_at_the_checkpoint_it_is_about_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    play = _with_backlog(300)
    looked_at = []
    checkpoint_work = planner._checkpoint_work

    def watched(state: State, checkpoint: Checkpoint) -> Iterator[Command]:
        looked_at.append(checkpoint.info.save)
        return checkpoint_work(state, checkpoint)

    monkeypatch.setattr(planner, "_checkpoint_work", watched)
    work = next(iter(play.in_flight))
    play.answer(work)
    play.tick()
    assert looked_at == [work.save]


def test_a_backlog_is_worked_off_to_its_last_checkpoint() -> None:
    play = _with_backlog(200)
    play.finish(limit=5_000)
    assert {checkpoint.phase for checkpoint in play.state.checkpoints.values()} == {Phase.RELEASED}
    committed = [event.work.save for event in play.journal if isinstance(event, Committed)]
    assert sorted(committed) == sorted(f"s{number}" for number in range(200))


def test_staging_is_linear_in_files() -> None:
    def seconds(files: int) -> float:
        play = Play()
        play.announce_only("save", (1,) * files)
        (stage,) = play.in_flight
        begun = process_time()
        play.answer(stage)
        return process_time() - begun

    assert min(seconds(10_000) for _ in range(3)) < 30 * min(seconds(1_000) for _ in range(3))

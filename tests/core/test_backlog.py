"""A store that was away for a day leaves thousands of checkpoints: an event costs no more than with a few.

Cost is counted in lines of the core that run, so that no other load on the machine changes it.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from tests.core.play import PART_BYTES, Play

from keepstep_agent import core
from keepstep_agent.core.agent import planner
from keepstep_agent.core.agent.checkpoint import Checkpoint
from keepstep_agent.core.agent.commands import Command
from keepstep_agent.core.agent.events import (
    Committed,
    DiskRead,
    RanksSeen,
    SaveBegun,
    Shed,
    StopRequested,
    TerminationNoticed,
)
from keepstep_agent.core.agent.state import State
from keepstep_agent.core.agent.work import Operation, WorkId
from keepstep_agent.core.model import Kind, Phase

_CORE = str(Path(core.__file__).parent)


def _lines(action: Callable[[], object]) -> int:
    """How many lines of the core run in it; a loop's count each time."""
    count = 0

    def in_core(_frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return in_core

    def anywhere(frame: FrameType, _event: str, _argument: Any) -> Any:
        return in_core if frame.f_code.co_filename.startswith(_CORE) else None

    before = sys.gettrace()
    sys.settrace(anywhere)
    try:
        action()
    finally:
        sys.settrace(before)
    return count


def _with_backlog(count: int, *, files: int = 1) -> Play:
    play = Play()
    for number in range(count):
        play.announce(f"s{number}", (PART_BYTES,) * files)
    return play


def _nearly_full(play: Play) -> None:
    """A save has begun for which even all that waits is not enough room."""
    size_bytes = 1_000_000 * PART_BYTES
    play.feed(SaveBegun(at=play.now, save="begun", attempt="attempt", step=1_000_000, size_bytes=size_bytes))
    play.feed(DiskRead(at=play.now, used_bytes=0, free_bytes=0, total_bytes=size_bytes))


def _answer_all(play: Play, *operations: Operation) -> None:
    while (work := next((work for work in play.in_flight if work.operation in operations), None)) is not None:
        play.answer(work)
        planner.next_wake(play.state)


def _save_just_in_time(play: Play) -> None:
    """From the notice to the commit of the last save; nothing else gets an answer but what is cancelled."""
    play.feed(RanksSeen(at=play.now, alive=frozenset({0})))
    play.feed(TerminationNoticed(at=play.now, deadline=play.now + 1_000, source="test"))
    play.announce("last", (PART_BYTES,) * 20, kind=Kind.JUST_IN_TIME)
    play.feed(StopRequested(at=play.now, trainers_gone=False))
    play.feed(RanksSeen(at=play.now, alive=frozenset()))
    while play.phase("last") is not Phase.COMMITTED:
        for work in list(play.in_flight):
            if work in play.state.cancelling:
                play.cancel(work)
            elif work.save == "last":
                play.answer(work)
            planner.next_wake(play.state)


def test_an_event_costs_the_same_whatever_waits_behind_it() -> None:
    def each(play: Play) -> int:
        work = next(work for work in play.in_flight if work.operation is not Operation.STAGE)
        return _lines(lambda: (play.answer(work), planner.next_wake(play.state)))

    few, many = _with_backlog(50, files=2), _with_backlog(1_000, files=2)
    assert max(each(many) for _ in range(100)) <= 1.1 * max(each(few) for _ in range(100))


def test_a_checkpoint_arrives_at_the_same_cost_whatever_waits() -> None:
    few, many = _with_backlog(50), _with_backlog(1_000)
    assert _lines(lambda: many.announce("next")) <= 1.1 * _lines(lambda: few.announce("next"))


def test_two_thousand_are_given_up_with_one_event_each_and_work_that_is_linear() -> None:
    def given_up(count: int) -> int:
        play = _with_backlog(count)
        before = len(play.journal)
        lines = _lines(lambda: _nearly_full(play))
        told = play.journal[before:]
        saves = [event.save for event in told if isinstance(event, Shed)]
        # The newest stays, and the two that have the wire and what it pushed aside.
        assert len(saves) == len(set(saves)) == len(told) >= count - 3
        lines += _lines(lambda: _answer_all(play, Operation.RELEASE, Operation.ABANDON))
        assert len(play.state.checkpoints) < 20
        return lines

    assert given_up(2_000) < 11 * given_up(200)


def test_pins_of_thousands_are_dropped_a_few_at_a_time() -> None:
    play = _with_backlog(100)
    _nearly_full(play)
    for _ in range(50):
        releases = [work for work in play.in_flight if work.operation is Operation.RELEASE]
        assert 1 <= len(releases) <= 4
        play.answer(releases[0])
    _answer_all(play, Operation.RELEASE)
    assert sum(checkpoint.pins_dropped for checkpoint in play.state.checkpoints.values()) >= 8


def test_a_backlog_asks_the_store_few_things_at_once_and_the_newest_does_not_wait() -> None:
    play = Play()
    for number in range(100):
        play.announce(f"s{number}", (1,), world_size=2)
    _answer_all(play, Operation.PUT_FILE)
    assert Counter(work.operation for work in play.in_flight) == {Operation.CHECK_SENT: 16}
    _answer_all(play, Operation.CHECK_SENT)
    assert Counter(work.operation for work in play.in_flight) == {Operation.WRITE_MANIFEST: 16}
    play.announce("newest", (1,))
    for operation in (Operation.PUT_FILE, Operation.CHECK_SENT, Operation.WRITE_MANIFEST, Operation.COMMIT):
        play.answer(next(work for work in play.in_flight if (work.save, work.operation) == ("newest", operation)))
    assert play.phase("newest") is Phase.COMMITTED
    _answer_all(play, Operation.WRITE_MANIFEST)
    assert sum(work.operation is Operation.COMMIT for work in play.in_flight) == 16


def test_a_just_in_time_save_costs_about_the_same_whatever_waits() -> None:
    few, many = _with_backlog(200), _with_backlog(2_000)
    # The notice looks at each once, so that nothing waits for its retry any more.
    notice = 32 * 1_800
    assert _lines(lambda: _save_just_in_time(many)) < 1.1 * _lines(lambda: _save_just_in_time(few)) + notice


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
    def lines(files: int) -> int:
        play = Play()
        play.announce_only("save", (1,) * files)
        return _lines(lambda: play.answer(WorkId(Operation.STAGE, "save", 0)))

    assert lines(10_000) < 11 * lines(1_000)

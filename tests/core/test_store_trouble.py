"""A store that is away is asked by one request at a time; a failure among successes concerns nobody else."""

import pytest
from tests.core.play import PART_BYTES, Play

from keepstep_agent.core.agent import planner
from keepstep_agent.core.agent.circuit_breaker import STORE_WIDE
from keepstep_agent.core.agent.events import Committed, TerminationNoticed
from keepstep_agent.core.agent.work import STAYS_HERE, Operation, WorkId
from keepstep_agent.core.errors import ErrorKind

_LONGEST_PAUSE_SECONDS = 5.0


def _on_the_wire(play: Play) -> list[WorkId]:
    return [work for work in play.in_flight if work.operation not in STAYS_HERE]


def _fail_all(play: Play, kind: ErrorKind = ErrorKind.UNREACHABLE) -> int:
    failing = _on_the_wire(play)
    for work in failing:
        play.fail(work, kind)
    return len(failing)


def _outage(play: Play, seconds: float) -> int:
    """Everything fails for so long; how many requests that took."""
    until, count = play.now + seconds, 0
    while play.now < until:
        count += _fail_all(play)
        play.wait_until(lambda: bool(_on_the_wire(play)))
    return count


@pytest.mark.parametrize("kind", sorted(STORE_WIDE))
def test_after_a_window_of_failures_one_request_asks_whether_the_store_is_back(kind: ErrorKind) -> None:
    play = Play(max_concurrency=8)
    play.announce("save", (PART_BYTES,) * 100)
    assert _fail_all(play, kind) == 8
    # One took the place of the first that failed, which alone says nothing of the store.
    assert _fail_all(play, kind) == 1
    for _ in range(5):
        assert _on_the_wire(play) == []
        play.wait_until(lambda: bool(_on_the_wire(play)))
        assert _fail_all(play, kind) == 1


@pytest.mark.parametrize("files", [3, 3_000])
def test_an_outage_costs_few_requests_however_much_waits(files: int) -> None:
    play = Play(max_concurrency=8)
    for number in range(5):
        play.announce(f"s{number}", (1,) * (files // 3))
    assert _outage(play, 600.0) < 8 + 600.0 / (_LONGEST_PAUSE_SECONDS / 2) + 10


def test_when_the_store_is_back_all_goes_on_after_one_pause_and_the_window_opens_fast() -> None:
    play = Play(max_concurrency=8)
    play.announce("save", (PART_BYTES,) * 100)
    _outage(play, 300.0)
    (asking,) = _on_the_wire(play)
    play.answer(asking)
    assert len(_on_the_wire(play)) == 2
    for expected in (4, 8, 8):
        for work in _on_the_wire(play):
            play.answer(work)
        assert len(_on_the_wire(play)) == expected


def test_all_kinds_of_work_wait_for_the_store_and_go_on_with_it() -> None:
    play = Play(max_concurrency=2)
    for number in range(12):
        play.announce(f"s{number}", (1,))
    sealing = (Operation.PUT_FILE, Operation.CHECK_SENT)
    while works := [work for work in play.in_flight if work.operation in sealing]:
        play.answer(works[0])
    assert _fail_all(play) == 12
    assert _outage(play, 100.0) < 100
    play.wait_until(lambda: _all_committed(play, 12))


def _all_committed(play: Play, count: int) -> bool:
    """After answering whatever is asked."""
    play.finish()
    return len({event.work.save for event in play.journal if isinstance(event, Committed)}) == count


def test_one_failure_among_successes_stops_nobody() -> None:
    play = Play(max_concurrency=8)
    play.announce("save", (PART_BYTES,) * 100)
    for _ in range(10):
        first, second, *_ = _on_the_wire(play)
        play.fail(first, ErrorKind.TIMED_OUT)
        play.answer(second)
        assert len(_on_the_wire(play)) == 8


def test_slow_down_is_an_answer_and_keeps_its_own_rule() -> None:
    play = Play(max_concurrency=8)
    play.announce("save", (PART_BYTES,) * 100)
    _fail_all(play, ErrorKind.THROTTLED)
    assert len(_on_the_wire(play)) == 4


def test_work_that_always_fails_does_not_hide_that_the_store_is_there() -> None:
    play = Play(max_concurrency=2)
    play.announce("good", (1,) * 5)
    play.announce("bad", (1,) * 4)
    for _ in range(200):
        for work in list(play.in_flight):
            if work.save == "bad" and work.operation not in STAYS_HERE:
                play.fail(work, ErrorKind.STORE_FAILED)
            else:
                play.answer(work)
        if play.state.checkpoints["good"].durable:
            break
        if not play.in_flight:
            play.wait_until(lambda: bool(play.in_flight))
    assert play.state.checkpoints["good"].durable
    assert play.now < 100.0 + 60.0


def test_a_request_that_hangs_does_not_keep_others_from_asking() -> None:
    play = Play(max_concurrency=8)
    play.announce("save", (PART_BYTES,) * 100)
    _fail_all(play)
    play.wait_until(lambda: bool(_on_the_wire(play)))
    begun = play.now
    play.wait_until(lambda: len(_on_the_wire(play)) == 2)
    assert play.now - begun <= 10.0


def test_in_a_drain_the_store_is_asked_every_second_at_least() -> None:
    play = Play(max_concurrency=8)
    play.announce("save", (PART_BYTES,) * 10)
    _outage(play, 300.0)
    while _fail_all(play):
        pass  # the last one to fail has the store asked whether it answers at all
    play.feed(TerminationNoticed(at=play.now, deadline=play.now + 30, source="test"))
    # Nothing waits: it is as if nothing had failed yet.
    assert len(_on_the_wire(play)) == 8
    for _ in range(20):
        _fail_all(play)
        failed_at = play.now
        play.wait_until(lambda: bool(_on_the_wire(play)))
        assert play.now - failed_at <= 1.0


def test_an_agent_that_waits_for_the_store_wakes_by_itself() -> None:
    play = Play()
    play.announce("save", (PART_BYTES,) * 3)
    _outage(play, 50.0)
    _fail_all(play)
    wake_at = planner.next_wake(play.state)
    assert wake_at is not None
    assert wake_at - play.now <= _LONGEST_PAUSE_SECONDS

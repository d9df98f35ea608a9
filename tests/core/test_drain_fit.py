"""Leaving: what still fits before the deadline, and what is therefore sent."""

from dataclasses import replace

import pytest
from tests.core.play import PART_BYTES, Play
from tests.core.pod_end import GRACE_SECONDS, notice, ranks_alive, stop

from keepstep_agent.core.agent import drain, planner
from keepstep_agent.core.agent.commands import Exit
from keepstep_agent.core.agent.work import Operation, WorkId
from keepstep_agent.core.model import Kind


def test_waiting_for_a_save_ends_while_the_newest_can_still_get_out() -> None:
    play = Play(max_concurrency=1)
    ranks_alive(play, 0)
    play.announce("measured", (PART_BYTES,) * 4)
    # One part a second.
    play.finish(seconds_each=1.0)
    notice(play)
    stop(play)
    assert drain.waiting_for_save(play.state)
    wake = planner.next_wake(play.state)
    assert wake is not None
    assert wake == pytest.approx(play.now + GRACE_SECONDS - 2.0)
    play.now = wake
    play.tick()
    assert play.exit == Exit(code=0, lost=())


def test_an_older_checkpoint_is_sent_only_if_it_fits_before_the_commit_reserve() -> None:
    play = Play(max_concurrency=1)
    play.announce("measured", (PART_BYTES,) * 4)
    play.finish(seconds_each=1.0)
    play.announce("fits", (PART_BYTES,) * 3)
    play.announce("too-large", (PART_BYTES,) * 60)
    play.announce("newest", (PART_BYTES,) * 3)
    notice(play)
    stop(play, trainers_gone=True)
    assert not drain.worth_sending(play.state, play.state.checkpoints["too-large"])
    assert drain.worth_sending(play.state, play.state.checkpoints["fits"])


@pytest.mark.parametrize("cap", [PART_BYTES, 0])
def test_what_fits_is_not_judged_by_a_cap_that_the_notice_has_lifted(cap: int) -> None:
    play = Play(max_concurrency=1)
    settings = play.state.settings
    play.state.settings = replace(settings, transfer=replace(settings.transfer, bandwidth_bytes_per_second=cap))
    play.announce("measured", (PART_BYTES,) * 4)
    play.finish(seconds_each=1.0)
    play.announce("older", (PART_BYTES,) * 60)
    play.announce("newest")
    notice(play)
    older = play.state.checkpoints["older"]
    assert drain.worth_sending(play.state, older) is (cap > 0)
    # The store, without the cap, is no faster.
    play.now += 1.0
    play.answer(WorkId(Operation.PUT_FILE, "older", 0, "r0-0"))
    assert not drain.worth_sending(play.state, older)


def test_what_will_not_fit_is_not_begun_again_beside_the_newest_ones_commit() -> None:
    play = Play(max_concurrency=1)
    play.announce("measured", (PART_BYTES,) * 4)
    play.finish(seconds_each=1.0)
    play.announce("too-large", (PART_BYTES,) * 60)
    play.announce("newest", kind=Kind.JUST_IN_TIME)
    notice(play)
    stop(play, trainers_gone=True)
    play.cancel(WorkId(Operation.PUT_FILE, "too-large", 0, "r0-0"))
    while play.exit is None:
        assert set(play.transfers()) <= {"newest"}
        play.answer(next(work for work in play.in_flight if work.save == "newest"))
    assert play.exit.code == 0
    assert len(play.exit.lost) == 1


def test_a_just_in_time_save_that_will_not_fit_takes_nothing_off_the_wire() -> None:
    play = Play(max_concurrency=1)
    play.announce("measured", (PART_BYTES,) * 4)
    play.finish(seconds_each=1.0)
    notice(play)
    play.announce("too-large", (PART_BYTES,) * 60, kind=Kind.JUST_IN_TIME)
    play.announce("newest", (PART_BYTES,) * 2)
    play.answer(WorkId(Operation.PUT_FILE, "too-large", 0, "r0-0"))
    assert play.transfers() == ["newest"]
    assert play.tick() == ()


def fail_all(play: Play) -> None:
    while play.in_flight:
        play.fail(next(iter(play.in_flight)))


def test_a_notice_hurries_what_waits_for_its_retry() -> None:
    play = Play(max_concurrency=1)
    play.announce("save")
    work = WorkId(Operation.PUT_FILE, "save", 0, "r0-0")
    for _ in range(8):
        fail_all(play)
        play.wait_until(lambda: work in play.in_flight)
    fail_all(play)
    assert not play.in_flight
    notice(play)
    assert play.transfers() == ["save"]

"""Leaving: when, and what the last line says. News may come in any order, and twice."""

from itertools import permutations

import pytest
from tests.core.play import PART_BYTES, Play
from tests.core.pod_end import GRACE_SECONDS, notice, ranks_alive, stop

from keepstep_agent.core.agent import drain, planner
from keepstep_agent.core.agent.commands import CancelTermination, Exit, LiftBandwidthCap, RequestSave
from keepstep_agent.core.agent.events import DiskRead, Started
from keepstep_agent.core.agent.work import Operation, WorkId
from keepstep_agent.core.errors import ErrorKind
from keepstep_agent.core.model import Kind, Phase
from keepstep_api.names import NOT_DURABLE_EXIT_CODE

_NEWS = ("notice", "save", "death", "sigterm")


def _tell(play: Play, news: str) -> None:
    match news:
        case "notice":
            notice(play)
        case "save":
            play.announce("last", (PART_BYTES,) * 2, kind=Kind.JUST_IN_TIME)
        case "death":
            ranks_alive(play)
        case "sigterm":
            stop(play)


def _orders() -> list[tuple[str, ...]]:
    """A dead trainer announces nothing, and kubelet's SIGTERM to a sidecar may come at any moment."""
    return [order for order in permutations(_NEWS) if order.index("save") < order.index("death")]


@pytest.mark.parametrize("order", _orders(), ids="-".join)
def test_with_time_enough_the_last_save_gets_out_whatever_the_order_of_the_news(order: tuple[str, ...]) -> None:
    play = Play()
    ranks_alive(play, 0)
    play.announce("before", (PART_BYTES,) * 4)
    for news in order:
        _tell(play, news)
        play.now += 0.5
    play.finish(seconds_each=0.2)
    assert play.phase("last") is Phase.RELEASED
    assert play.exit == Exit(code=0, lost=(), stopped=True)


@pytest.mark.parametrize("order", _orders(), ids="-".join)
def test_with_too_little_time_the_agent_leaves_before_the_deadline_and_says_what_is_lost(
    order: tuple[str, ...],
) -> None:
    play = Play()
    ranks_alive(play, 0)
    for news in order:
        _tell(play, news)
        play.now += 0.5
    until = drain.deadline(play.state)
    assert until is not None
    while play.exit is None and (wake := planner.next_wake(play.state)) is not None:
        play.now = wake
        play.tick()
    assert play.exit is not None
    assert play.now < until
    assert play.exit.code == NOT_DURABLE_EXIT_CODE
    assert [line.split(" is ")[0] for line in play.exit.lost] == ["checkpoint-1 (step 1, just-in-time)"]


def test_what_was_sent_is_read_again_only_while_no_deadline_can_be_missed_by_it() -> None:
    play = Play()
    assert [kind for kind in Kind if not drain.may_read_again(play.state, kind)] == [Kind.JUST_IN_TIME]
    notice(play)
    assert not any(drain.may_read_again(play.state, kind) for kind in Kind)
    play.now += 10 * GRACE_SECONDS
    play.tick()
    assert drain.may_read_again(play.state, Kind.PERIODIC), "the pod was spared"


def _fails_until(play: Play, until: float) -> None:
    """Every transfer fails, as those to a store that is unreachable."""
    while play.exit is None and play.now < until:
        for work in [work for work in play.in_flight if work.operation in (Operation.PUT_FILE, Operation.ASK)]:
            play.fail(work, ErrorKind.UNREACHABLE)
        play.wait_until(lambda: bool(play.in_flight) or play.exit is not None)


@pytest.mark.parametrize("lost", ["before the end", "after the end"])
def test_without_a_deadline_an_unreachable_store_is_given_up_after_the_timeout(lost: str) -> None:
    play = Play()
    play.announce("save", (1,) * 4)
    if lost == "before the end":
        _fails_until(play, play.now + 1000)
    stop(play, trainers_gone=True)
    ended_at = play.now
    _fails_until(play, play.now + 1000)
    assert play.exit is not None
    assert play.exit.code == NOT_DURABLE_EXIT_CODE
    timeout_seconds = play.state.settings.termination.drain_timeout_seconds
    assert ended_at + timeout_seconds <= play.now <= ended_at + timeout_seconds + 10


def test_without_a_deadline_a_store_that_comes_back_in_time_gets_everything() -> None:
    play = Play()
    play.announce("save", (1,) * 4)
    stop(play, trainers_gone=True)
    timeout_seconds = play.state.settings.termination.drain_timeout_seconds
    for _ in range(3):
        _fails_until(play, play.now + timeout_seconds - 10)
        assert play.exit is None
        work = next(iter(play.in_flight))
        play.answer(work)
    play.finish(seconds_each=timeout_seconds)
    assert play.exit == Exit(code=0, lost=())


def test_with_nothing_to_send_the_agent_leaves_at_once() -> None:
    play = Play()
    play.announce("save")
    play.finish()
    stop(play)
    assert play.exit == Exit(code=0, lost=())


def test_a_stop_without_a_save_to_show_is_a_good_end() -> None:
    play = Play()
    stop(play)
    assert play.exit == Exit(code=0, lost=())


def test_without_a_deadline_the_agent_stays_until_everything_is_committed() -> None:
    play = Play()
    play.announce("old", (PART_BYTES,) * 3)
    play.announce("new", (PART_BYTES,) * 3)
    stop(play, trainers_gone=True)
    assert play.exit is None
    assert planner.next_wake(play.state) is None
    play.finish()
    assert play.exit == Exit(code=0, lost=())


def test_the_earliest_deadline_counts_and_a_save_is_requested_when_it_moves() -> None:
    play = Play()
    first = notice(play, grace_seconds=100)
    later = notice(play, grace_seconds=200)
    earlier = notice(play, grace_seconds=20)
    assert [type(command) for command in first] == [LiftBandwidthCap, RequestSave]
    assert later == ()
    assert earlier == (RequestSave(terminating=True, deadline=play.now + 20),)


def test_a_sigterm_leaves_two_seconds_even_when_the_trainer_used_up_the_grace() -> None:
    play = Play()
    play.announce("save")
    notice(play, grace_seconds=10)
    play.now += 10
    stop(play)
    stop(play)
    assert drain.deadline(play.state) == play.now + 2


def test_a_second_sigterm_gives_no_more_time() -> None:
    play = Play()
    play.announce("save")
    notice(play, grace_seconds=1)
    play.now += 1
    stop(play)
    until = drain.deadline(play.state)
    play.now += 1
    stop(play)
    assert drain.deadline(play.state) == until


def test_a_notice_that_ends_nothing_is_void_a_minute_after_its_deadline() -> None:
    play = Play()
    notice(play, grace_seconds=10)
    wake = planner.next_wake(play.state)
    assert wake == play.now + 70
    play.now = wake
    play.tick()
    assert not play.state.termination.noticed


def test_a_restart_in_the_middle_of_a_drain_goes_on_with_it() -> None:
    play = Play()
    notice(play)
    play.now += 1
    commands = play.feed(Started(at=play.now, fresh=False))
    assert [type(command) for command in commands] == [LiftBandwidthCap, RequestSave]


def test_a_new_pod_owes_nothing_to_the_notice_of_the_old_one() -> None:
    play = Play()
    notice(play)
    assert play.feed(Started(at=play.now, fresh=True)) == ()
    assert not play.state.termination.noticed


def test_exit_names_a_failed_save_with_its_reason() -> None:
    play = Play()
    play.announce("save")
    play.fail(WorkId(Operation.PUT_FILE, "save", 0, "r0-0"), ErrorKind.FILE_CHANGED)
    stop(play, trainers_gone=True)
    assert play.exit is not None
    assert play.exit.code == NOT_DURABLE_EXIT_CODE
    assert "(file-changed)" in play.exit.lost[0]


def test_what_was_shed_is_not_called_lost() -> None:
    play = Play(max_concurrency=1)
    play.announce("old", (PART_BYTES,) * 3)
    play.announce("new", (PART_BYTES,) * 3)
    play.feed(DiskRead(at=play.now, used_bytes=0, free_bytes=0, total_bytes=1))
    for work in [work for work in play.in_flight if work.save == "old" and work.operation is not Operation.RELEASE]:
        play.cancel(work)
    play.finish()
    stop(play, trainers_gone=True)
    assert play.phase("old") is Phase.SHED
    assert play.exit == Exit(code=0, lost=())


def test_a_pod_that_was_spared_gets_its_bandwidth_cap_back_once() -> None:
    play = Play()
    assert LiftBandwidthCap() in notice(play)
    play.now += GRACE_SECONDS + 60
    assert CancelTermination() in play.tick()
    assert not play.state.termination.noticed
    play.now += 60
    assert CancelTermination() not in play.tick()
    # And with the next notice everything counts again.
    assert LiftBandwidthCap() in notice(play)

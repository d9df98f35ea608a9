"""Leaving: whom to wait for, what still fits, and what the last line says. News may come in any order, and twice."""

from dataclasses import replace
from itertools import permutations

import pytest
from tests.core.play import PART_BYTES, Play

from mooring_agent.core.agent import drain, planner
from mooring_agent.core.agent.commands import CancelTermination, Exit, LiftBandwidthCap, RequestSave
from mooring_agent.core.agent.events import (
    CommitWaits,
    DiskRead,
    Exited,
    RankRegistered,
    RanksSeen,
    Started,
    StopRequested,
    TerminationNoticed,
)
from mooring_agent.core.agent.work import Operation, WorkId
from mooring_agent.core.errors import ErrorKind
from mooring_agent.core.model import Kind, Phase

_GRACE_SECONDS = 30.0
_NEWS = ("notice", "save", "death", "sigterm")


def _notice(play: Play, *, grace_seconds: float | None = _GRACE_SECONDS) -> tuple[object, ...]:
    deadline = None if grace_seconds is None else play.now + grace_seconds
    return play.feed(TerminationNoticed(at=play.now, deadline=deadline, source="test"))


def _stop(play: Play, *, trainers_gone: bool = False) -> None:
    play.feed(StopRequested(at=play.now, trainers_gone=trainers_gone))


def _alive(play: Play, *local_ranks: int) -> None:
    play.feed(RanksSeen(at=play.now, alive=frozenset(local_ranks)))


def _tell(play: Play, news: str) -> None:
    match news:
        case "notice":
            _notice(play)
        case "save":
            play.announce("last", (PART_BYTES,) * 2, kind=Kind.JUST_IN_TIME)
        case "death":
            _alive(play)
        case "sigterm":
            _stop(play)


def _orders() -> list[tuple[str, ...]]:
    """A dead trainer announces nothing, and kubelet's SIGTERM to a sidecar may come at any moment."""
    return [order for order in permutations(_NEWS) if order.index("save") < order.index("death")]


@pytest.mark.parametrize("order", _orders(), ids="-".join)
def test_with_time_enough_the_last_save_gets_out_whatever_the_order_of_the_news(order: tuple[str, ...]) -> None:
    play = Play()
    _alive(play, 0)
    play.announce("before", (PART_BYTES,) * 4)
    for news in order:
        _tell(play, news)
        play.now += 0.5
    play.finish(seconds_each=0.2)
    assert play.phase("last") is Phase.RELEASED
    assert play.exit == Exit(code=0, lost=())


@pytest.mark.parametrize("order", _orders(), ids="-".join)
def test_with_too_little_time_the_agent_leaves_before_the_deadline_and_says_what_is_lost(
    order: tuple[str, ...],
) -> None:
    play = Play()
    _alive(play, 0)
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
    assert play.exit.code == drain.EXIT_NOT_DURABLE
    assert [line.split(" is ")[0] for line in play.exit.lost] == ["checkpoint-1 (step 1, just-in-time)"]


def test_what_was_sent_is_read_again_only_while_no_deadline_can_be_missed_by_it() -> None:
    play = Play()
    assert [kind for kind in Kind if not drain.may_read_again(play.state, kind)] == [Kind.JUST_IN_TIME]
    _notice(play)
    assert not any(drain.may_read_again(play.state, kind) for kind in Kind)
    play.now += 10 * _GRACE_SECONDS
    play.tick()
    assert drain.may_read_again(play.state, Kind.PERIODIC), "the pod was spared"


def _fails_until(play: Play, until: float) -> None:
    """Every transfer fails, as those to a store that is unreachable."""
    while play.exit is None and play.now < until:
        for work in [work for work in play.in_flight if work.operation is Operation.PUT_FILE]:
            play.fail(work, ErrorKind.UNREACHABLE)
        play.wait_until(lambda: bool(play.in_flight) or play.exit is not None)


@pytest.mark.parametrize("lost", ["before the end", "after the end"])
def test_without_a_deadline_an_unreachable_store_is_given_up_after_a_grace_period(lost: str) -> None:
    play = Play()
    play.announce("save", (1,) * 4)
    if lost == "before the end":
        _fails_until(play, play.now + 1000)
    _stop(play, trainers_gone=True)
    ended_at = play.now
    _fails_until(play, play.now + 1000)
    assert play.exit is not None
    assert play.exit.code == drain.EXIT_NOT_DURABLE
    grace_seconds = play.state.settings.termination.grace_seconds
    assert ended_at + grace_seconds <= play.now <= ended_at + grace_seconds + 10


def test_without_a_deadline_a_store_that_comes_back_in_time_gets_everything() -> None:
    play = Play()
    play.announce("save", (1,) * 4)
    _stop(play, trainers_gone=True)
    for _ in range(3):
        _fails_until(play, play.now + play.state.settings.termination.grace_seconds - 10)
        assert play.exit is None
        work = next(iter(play.in_flight))
        play.answer(work)
    play.finish(seconds_each=play.state.settings.termination.grace_seconds)
    assert play.exit == Exit(code=0, lost=())


def test_with_nothing_to_send_the_agent_leaves_at_once() -> None:
    play = Play()
    play.announce("save")
    play.finish()
    _stop(play)
    assert play.exit == Exit(code=0, lost=())


def test_a_stop_without_a_save_to_show_is_a_good_end() -> None:
    play = Play()
    _stop(play)
    assert play.exit == Exit(code=0, lost=())


def test_without_a_deadline_the_agent_stays_until_everything_is_committed() -> None:
    play = Play()
    play.announce("old", (PART_BYTES,) * 3)
    play.announce("new", (PART_BYTES,) * 3)
    _stop(play, trainers_gone=True)
    assert play.exit is None
    assert planner.next_wake(play.state) is None
    play.finish()
    assert play.exit == Exit(code=0, lost=())


def test_a_live_rank_is_waited_for_until_it_has_announced_its_last_save() -> None:
    play = Play()
    _alive(play, 0, 1)
    _notice(play)
    _stop(play)
    play.announce("last", kind=Kind.JUST_IN_TIME, world_size=2, local_world_size=2)
    play.finish()
    assert play.exit is None
    play.announce("last", kind=Kind.JUST_IN_TIME, rank=1, world_size=2, local_world_size=2)
    play.finish()
    assert play.exit == Exit(code=0, lost=())


def test_a_rank_that_announced_and_left_does_not_stand_for_one_that_did_not() -> None:
    play = Play()
    _alive(play, 0, 1)
    _notice(play)
    _stop(play)
    play.announce("last", kind=Kind.JUST_IN_TIME, world_size=2, local_world_size=2)
    _alive(play, 1)
    play.finish()
    assert drain.waiting_for_save(play.state)
    play.announce("last", kind=Kind.JUST_IN_TIME, rank=1, world_size=2, local_world_size=2)
    play.finish()
    assert not drain.waiting_for_save(play.state)


def test_waiting_for_a_save_ends_while_the_newest_can_still_get_out() -> None:
    play = Play(max_concurrency=1)
    _alive(play, 0)
    play.announce("measured", (PART_BYTES,) * 4)
    # One part a second.
    play.finish(seconds_each=1.0)
    _notice(play)
    _stop(play)
    assert drain.waiting_for_save(play.state)
    wake = planner.next_wake(play.state)
    assert wake is not None
    assert wake == pytest.approx(play.now + _GRACE_SECONDS - 2.0)
    play.now = wake
    play.tick()
    assert play.exit == Exit(code=0, lost=())


def test_a_save_that_a_dead_local_rank_left_incomplete_is_not_waited_for() -> None:
    play = Play()
    play.announce("older")
    play.finish()
    play.announce("broken", world_size=2, local_world_size=2)
    play.finish()
    _stop(play, trainers_gone=True)
    assert play.exit is not None
    assert play.exit.code == drain.EXIT_NOT_DURABLE
    assert play.exit.lost[0].startswith("checkpoint-2 ")


def test_an_older_save_that_only_other_agents_can_complete_keeps_nobody_here() -> None:
    play = Play()
    play.announce("older", world_size=2)
    _until_committing(play, "older")
    del play.in_flight[WorkId(Operation.COMMIT, "older")]
    play.feed(CommitWaits(at=play.now, work=WorkId(Operation.COMMIT, "older"), missing_ranks=1))
    play.announce("newest")
    play.finish()
    _stop(play, trainers_gone=True)
    assert play.exit is not None
    assert play.exit.code == 0
    assert play.exit.lost[0].startswith("checkpoint-1 ")


def test_an_older_checkpoint_is_sent_only_if_it_fits_before_the_commit_reserve() -> None:
    play = Play(max_concurrency=1)
    play.announce("measured", (PART_BYTES,) * 4)
    play.finish(seconds_each=1.0)
    play.announce("fits", (PART_BYTES,) * 3)
    play.announce("too-large", (PART_BYTES,) * 60)
    play.announce("newest", (PART_BYTES,) * 3)
    _notice(play)
    _stop(play, trainers_gone=True)
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
    _notice(play)
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
    _notice(play)
    _stop(play, trainers_gone=True)
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
    _notice(play)
    play.announce("too-large", (PART_BYTES,) * 60, kind=Kind.JUST_IN_TIME)
    play.announce("newest", (PART_BYTES,) * 2)
    play.answer(WorkId(Operation.PUT_FILE, "too-large", 0, "r0-0"))
    assert play.transfers() == ["newest"]
    assert play.tick() == ()


def test_the_earliest_deadline_counts_and_a_save_is_requested_when_it_moves() -> None:
    play = Play()
    first = _notice(play, grace_seconds=100)
    later = _notice(play, grace_seconds=200)
    earlier = _notice(play, grace_seconds=20)
    assert [type(command) for command in first] == [LiftBandwidthCap, RequestSave]
    assert later == ()
    assert earlier == (RequestSave(terminating=True, deadline=play.now + 20),)


def test_a_sigterm_leaves_two_seconds_even_when_the_trainer_used_up_the_grace() -> None:
    play = Play()
    play.announce("save")
    _notice(play, grace_seconds=10)
    play.now += 10
    _stop(play)
    _stop(play)
    assert drain.deadline(play.state) == play.now + 2


def test_a_second_sigterm_gives_no_more_time() -> None:
    play = Play()
    play.announce("save")
    _notice(play, grace_seconds=1)
    play.now += 1
    _stop(play)
    until = drain.deadline(play.state)
    play.now += 1
    _stop(play)
    assert drain.deadline(play.state) == until


def test_a_notice_that_ends_nothing_is_void_a_minute_after_its_deadline() -> None:
    play = Play()
    _notice(play, grace_seconds=10)
    wake = planner.next_wake(play.state)
    assert wake == play.now + 70
    play.now = wake
    play.tick()
    assert not play.state.termination.noticed


def test_a_notice_hurries_what_waits_for_its_retry() -> None:
    play = Play(max_concurrency=1)
    play.announce("save")
    work = WorkId(Operation.PUT_FILE, "save", 0, "r0-0")
    for _ in range(8):
        play.fail(work)
        play.wait_until(lambda: work in play.in_flight)
    play.fail(work)
    assert not play.in_flight
    _notice(play)
    assert play.transfers() == ["save"]


def test_a_restart_in_the_middle_of_a_drain_goes_on_with_it() -> None:
    play = Play()
    _notice(play)
    play.now += 1
    commands = play.feed(Started(at=play.now, fresh=False))
    assert [type(command) for command in commands] == [LiftBandwidthCap, RequestSave]


def test_a_new_pod_owes_nothing_to_the_notice_of_the_old_one() -> None:
    play = Play()
    _notice(play)
    assert play.feed(Started(at=play.now, fresh=True)) == ()
    assert not play.state.termination.noticed


def test_exit_names_a_failed_save_with_its_reason() -> None:
    play = Play()
    play.announce("save")
    play.fail(WorkId(Operation.PUT_FILE, "save", 0, "r0-0"), ErrorKind.FILE_CHANGED)
    _stop(play, trainers_gone=True)
    assert play.exit is not None
    assert play.exit.code == drain.EXIT_NOT_DURABLE
    assert "(file-changed)" in play.exit.lost[0]


def test_what_was_shed_is_not_called_lost() -> None:
    play = Play(max_concurrency=1)
    play.announce("old", (PART_BYTES,) * 3)
    play.announce("new", (PART_BYTES,) * 3)
    play.feed(DiskRead(at=play.now, used_bytes=0, free_bytes=0, total_bytes=1))
    for work in [work for work in play.in_flight if work.save == "old" and work.operation is not Operation.RELEASE]:
        play.cancel(work)
    play.finish()
    _stop(play, trainers_gone=True)
    assert play.phase("old") is Phase.SHED
    assert play.exit == Exit(code=0, lost=())


def _until_committing(play: Play, save: str) -> None:
    while WorkId(Operation.COMMIT, save) not in play.in_flight:
        play.answer(next(work for work in play.in_flight if work.save == save))


def test_a_pod_that_was_spared_gets_its_bandwidth_cap_back_once() -> None:
    play = Play()
    assert LiftBandwidthCap() in _notice(play)
    play.now += _GRACE_SECONDS + 60
    assert CancelTermination() in play.tick()
    assert not play.state.termination.noticed
    play.now += 60
    assert CancelTermination() not in play.tick()
    # And with the next notice everything counts again.
    assert LiftBandwidthCap() in _notice(play)


def test_the_last_save_of_an_end_that_did_not_come_is_not_that_of_the_next() -> None:
    play = Play()
    _alive(play, 0)
    _notice(play)
    play.announce("spared", kind=Kind.JUST_IN_TIME)
    play.finish()
    _alive(play)
    play.now += _GRACE_SECONDS + 60
    play.tick()
    _alive(play, 0)
    _notice(play)
    _stop(play)
    assert play.exit is None, "a living trainer owes its save"
    play.announce("last", kind=Kind.JUST_IN_TIME)
    play.finish()
    assert play.exit == Exit(code=0, lost=())


def _register(play: Play, ranks: dict[int, int]) -> None:
    """Local rank -> rank."""
    for local_rank, rank in ranks.items():
        play.feed(RankRegistered(at=play.now, local_rank=local_rank, rank=rank))


def _last(play: Play, *ranks: int, local_world_size: int = 2) -> None:
    for rank in ranks:
        play.announce("last", kind=Kind.JUST_IN_TIME, rank=rank, world_size=4, local_world_size=local_world_size)


@pytest.mark.parametrize("first", [2, 3])
def test_of_registered_ranks_exactly_those_that_live_and_have_not_announced_are_waited_for(first: int) -> None:
    play = Play()
    _alive(play, 0, 1)
    _register(play, {0: 2, 1: 3})
    _notice(play)
    _stop(play)
    assert drain.waiting_for_save(play.state)
    _last(play, first)
    assert drain.waiting_for_save(play.state)
    # It alone is left; who announced and died owes nothing.
    _alive(play, {2: 1, 3: 0}[first])
    assert drain.waiting_for_save(play.state)
    _last(play, 5 - first)
    assert not drain.waiting_for_save(play.state)


def test_a_registered_rank_that_died_before_it_announced_holds_nobody_up() -> None:
    play = Play()
    play.announce("before")
    _alive(play, 0, 1)
    _register(play, {0: 0, 1: 1})
    _notice(play)
    _stop(play)
    _last(play, 0)
    _alive(play, 0)
    assert not drain.waiting_for_save(play.state)
    # Rank 0 lives on, and can do nothing for it either; what was whole before gets out.
    play.finish()
    assert play.phase("before") is Phase.RELEASED
    assert play.exit is not None
    assert play.exit.code == drain.EXIT_NOT_DURABLE
    assert [line.split(" is ")[0] for line in play.exit.lost] == ["checkpoint-2 (step 2, just-in-time)"]


def test_beside_a_last_save_that_nobody_can_complete_the_one_before_it_is_sent_to_the_very_end() -> None:
    play = Play(max_concurrency=1)
    play.announce("measured", (PART_BYTES,) * 4)
    play.finish(seconds_each=1.0)
    _alive(play, 0, 1)
    _register(play, {0: 0, 1: 1})
    play.announce("before", (PART_BYTES,) * 60)
    _notice(play)
    _stop(play)
    _last(play, 0)
    _alive(play, 0)
    assert not drain.worth_sending(play.state, play.state.checkpoints["before"])
    assert "before" in play.transfers()
    play.now += 20
    play.tick()
    assert play.exit is None


def test_ranks_that_have_nothing_to_announce_because_one_writes_for_all_are_not_waited_for() -> None:
    play = Play()
    _alive(play, 0, 1)
    _register(play, {0: 0, 1: 1})
    _notice(play)
    _stop(play)
    play.announce("last", kind=Kind.JUST_IN_TIME)
    play.finish()
    assert play.exit == Exit(code=0, lost=())


def test_a_save_that_is_announced_after_the_last_one_does_not_take_its_place() -> None:
    play = Play()
    _alive(play, 0)
    _register(play, {0: 0})
    _notice(play)
    _stop(play)
    play.announce_only("last", kind=Kind.JUST_IN_TIME)
    # It was being written asynchronously.
    play.announce("before")
    play.answer(WorkId(Operation.STAGE, "last", 0))
    play.finish()
    assert play.exit == Exit(code=0, lost=())


def test_who_goes_on_after_a_final_save_owes_another_one() -> None:
    play = Play()
    _alive(play, 0)
    _register(play, {0: 0})
    play.announce("end of the first part", kind=Kind.FINAL)
    play.announce("of the second part")
    _notice(play)
    assert drain.waiting_for_save(play.state)
    play.announce("end of the second part", kind=Kind.FINAL)
    assert not drain.waiting_for_save(play.state)


def test_while_one_lives_that_has_not_said_which_rank_it_is_they_are_counted() -> None:
    play = Play()
    _alive(play, 0, 1)
    _register(play, {0: 0})
    _notice(play)
    _stop(play)
    _last(play, 1)
    assert drain.waiting_for_save(play.state)
    _last(play, 0)
    assert not drain.waiting_for_save(play.state)


def test_which_rank_is_which_outlives_a_restart_and_not_an_orderly_end() -> None:
    play = Play()
    _register(play, {0: 2, 1: 3})
    play.feed(Started(at=play.now, fresh=False))
    assert play.state.ranks == {0: 2, 1: 3}
    play.feed(Exited(at=play.now))
    assert play.state.ranks == {}

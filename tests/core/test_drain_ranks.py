"""Leaving: whom to wait for, as ranks announce, die and live on."""

import pytest
from tests.core.play import PART_BYTES, Play
from tests.core.pod_end import GRACE_SECONDS, notice, ranks_alive, stop

from keepstep_agent.core.agent import drain
from keepstep_agent.core.agent.commands import Exit
from keepstep_agent.core.agent.events import CommitWaits, Exited, RankRegistered, Started
from keepstep_agent.core.agent.work import Operation, WorkId
from keepstep_agent.core.model import Kind, Phase
from keepstep_api.names import NOT_DURABLE_EXIT_CODE


def test_a_live_rank_is_waited_for_until_it_has_announced_its_last_save() -> None:
    play = Play()
    ranks_alive(play, 0, 1)
    notice(play)
    stop(play)
    play.announce("last", kind=Kind.JUST_IN_TIME, world_size=2, local_world_size=2)
    play.finish()
    assert play.exit is None
    play.announce("last", kind=Kind.JUST_IN_TIME, rank=1, world_size=2, local_world_size=2)
    play.finish()
    assert play.exit == Exit(code=0, lost=(), stopped=True)


def test_a_rank_that_announced_and_left_does_not_stand_for_one_that_did_not() -> None:
    play = Play()
    ranks_alive(play, 0, 1)
    notice(play)
    stop(play)
    play.announce("last", kind=Kind.JUST_IN_TIME, world_size=2, local_world_size=2)
    ranks_alive(play, 1)
    play.finish()
    assert drain.waiting_for_save(play.state)
    play.announce("last", kind=Kind.JUST_IN_TIME, rank=1, world_size=2, local_world_size=2)
    play.finish()
    assert not drain.waiting_for_save(play.state)


def test_a_save_that_a_dead_local_rank_left_incomplete_is_not_waited_for() -> None:
    play = Play()
    play.announce("older")
    play.finish()
    play.announce("broken", world_size=2, local_world_size=2)
    play.finish()
    stop(play, trainers_gone=True)
    assert play.exit is not None
    assert play.exit.code == NOT_DURABLE_EXIT_CODE
    assert play.exit.lost[0].startswith("checkpoint-2 ")


def test_an_older_save_that_only_other_agents_can_complete_keeps_nobody_here() -> None:
    play = Play()
    play.announce("older", world_size=2)
    _until_committing(play, "older")
    del play.in_flight[WorkId(Operation.COMMIT, "older")]
    play.feed(CommitWaits(at=play.now, work=WorkId(Operation.COMMIT, "older"), missing_ranks=1))
    play.announce("newest")
    play.finish()
    stop(play, trainers_gone=True)
    assert play.exit is not None
    assert play.exit.code == 0
    assert play.exit.lost[0].startswith("checkpoint-1 ")


def _until_committing(play: Play, save: str) -> None:
    while WorkId(Operation.COMMIT, save) not in play.in_flight:
        play.answer(next(work for work in play.in_flight if work.save == save))


def test_the_last_save_of_an_end_that_did_not_come_is_not_that_of_the_next() -> None:
    play = Play()
    ranks_alive(play, 0)
    notice(play)
    play.announce("spared", kind=Kind.JUST_IN_TIME)
    play.finish()
    ranks_alive(play)
    play.now += GRACE_SECONDS + 60
    play.tick()
    ranks_alive(play, 0)
    notice(play)
    stop(play)
    assert play.exit is None, "a living trainer owes its save"
    play.announce("last", kind=Kind.JUST_IN_TIME)
    play.finish()
    assert play.exit == Exit(code=0, lost=(), stopped=True)


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
    ranks_alive(play, 0, 1)
    _register(play, {0: 2, 1: 3})
    notice(play)
    stop(play)
    assert drain.waiting_for_save(play.state)
    _last(play, first)
    assert drain.waiting_for_save(play.state)
    # It alone is left; who announced and died owes nothing.
    ranks_alive(play, {2: 1, 3: 0}[first])
    assert drain.waiting_for_save(play.state)
    _last(play, 5 - first)
    assert not drain.waiting_for_save(play.state)


def test_a_registered_rank_that_died_before_it_announced_holds_nobody_up() -> None:
    play = Play()
    play.announce("before")
    ranks_alive(play, 0, 1)
    _register(play, {0: 0, 1: 1})
    notice(play)
    stop(play)
    _last(play, 0)
    ranks_alive(play, 0)
    assert not drain.waiting_for_save(play.state)
    # Rank 0 lives on, and can do nothing for it either; what was whole before gets out.
    play.finish()
    assert play.phase("before") is Phase.RELEASED
    assert play.exit is not None
    assert play.exit.code == NOT_DURABLE_EXIT_CODE
    assert [line.split(" is ")[0] for line in play.exit.lost] == ["checkpoint-2 (step 2, just-in-time)"]


def test_beside_a_last_save_that_nobody_can_complete_the_one_before_it_is_sent_to_the_very_end() -> None:
    play = Play(max_concurrency=1)
    play.announce("measured", (PART_BYTES,) * 4)
    play.finish(seconds_each=1.0)
    ranks_alive(play, 0, 1)
    _register(play, {0: 0, 1: 1})
    play.announce("before", (PART_BYTES,) * 60)
    notice(play)
    stop(play)
    _last(play, 0)
    ranks_alive(play, 0)
    assert not drain.worth_sending(play.state, play.state.checkpoints["before"])
    assert "before" in play.transfers()
    play.now += 20
    play.tick()
    assert play.exit is None


def test_ranks_that_have_nothing_to_announce_because_one_writes_for_all_are_not_waited_for() -> None:
    play = Play()
    ranks_alive(play, 0, 1)
    _register(play, {0: 0, 1: 1})
    notice(play)
    stop(play)
    play.announce("last", kind=Kind.JUST_IN_TIME)
    play.finish()
    assert play.exit == Exit(code=0, lost=(), stopped=True)


def test_a_save_that_is_announced_after_the_last_one_does_not_take_its_place() -> None:
    play = Play()
    ranks_alive(play, 0)
    _register(play, {0: 0})
    notice(play)
    stop(play)
    play.announce_only("last", kind=Kind.JUST_IN_TIME)
    # It was being written asynchronously.
    play.announce("before")
    play.answer(WorkId(Operation.STAGE, "last", 0))
    play.finish()
    assert play.exit == Exit(code=0, lost=(), stopped=True)


def test_who_goes_on_after_a_final_save_owes_another_one() -> None:
    play = Play()
    ranks_alive(play, 0)
    _register(play, {0: 0})
    play.announce("end of the first part", kind=Kind.FINAL)
    play.announce("of the second part")
    notice(play)
    assert drain.waiting_for_save(play.state)
    play.announce("end of the second part", kind=Kind.FINAL)
    assert not drain.waiting_for_save(play.state)


def test_while_one_lives_that_has_not_said_which_rank_it_is_they_are_counted() -> None:
    play = Play()
    ranks_alive(play, 0, 1)
    _register(play, {0: 0})
    notice(play)
    stop(play)
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

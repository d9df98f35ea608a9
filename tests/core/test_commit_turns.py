"""Who lists, who writes the marker, who only reads it, and when: the committer, its deputies, and all others."""

from collections.abc import Iterator
from itertools import pairwise

import pytest
from tests.core.play import PART_BYTES, Play

from keepstep_agent.core.agent import planner
from keepstep_agent.core.agent.commands import Commit, Turn, WriteManifest
from keepstep_agent.core.agent.events import CommitWaits, Started, TerminationNoticed
from keepstep_agent.core.agent.work import Operation, WorkId
from keepstep_agent.core.model import Phase

_COMMIT = WorkId(Operation.COMMIT, "save")
_WORLD = 2_000


def _sealed(play: Play, *, rank: int) -> None:
    """The agent's only rank is sealed. So its place in line is the number of that rank."""
    play.announce("save", rank=rank, world_size=_WORLD)
    while play.phase("save") is not Phase.SEALED:
        play.answer(next(iter(play.in_flight)))


def _tries(play: Play, *, missing_ranks: int, seconds: float) -> Iterator[tuple[float, Turn]]:
    """Yield the tries to commit in the next seconds, as (seconds since the seal, turn).

    A try that lists finds so many missing ranks.
    """
    sealed_at = play.now
    while True:
        while _COMMIT not in play.in_flight:
            wake_at = planner.next_wake(play.state)
            assert wake_at is not None, "nobody would wake it"
            if wake_at > sealed_at + seconds:
                return
            play.now = wake_at
            play.tick()
        command = play.in_flight.pop(_COMMIT)
        assert isinstance(command, Commit)
        yield round(play.now - sealed_at, 6), command.turn
        missing = None if command.turn is Turn.READ else missing_ranks
        play.feed(CommitWaits(at=play.now, work=_COMMIT, missing_ranks=missing))


def _listings(play: Play, *, missing_ranks: int, seconds: float) -> list[tuple[float, Turn]]:
    tries = _tries(play, missing_ranks=missing_ranks, seconds=seconds)
    return [(at, turn) for at, turn in tries if turn is not Turn.READ]


def _pauses(tries: list[tuple[float, Turn]]) -> list[float]:
    return [round(later - earlier, 6) for (earlier, _), (later, _) in pairwise(tries)]


def test_the_committer_pauses_for_a_tenth_of_its_wait_and_at_most_for_a_second() -> None:
    play = Play()
    _sealed(play, rank=0)
    tries = list(_tries(play, missing_ranks=1, seconds=60))
    assert {turn for _, turn in tries} == {Turn.WRITE}
    assert tries[0][0] == 0.0
    pauses = _pauses(tries)
    assert pauses == sorted(pauses)
    expected = [min(1.0, max(0.1, waited_seconds / 10)) for waited_seconds, _ in tries[:-1]]
    assert pauses == pytest.approx(expected, abs=1e-3)


def test_an_agent_far_behind_in_line_reads_the_marker_ever_less_often_and_lists_after_minutes() -> None:
    play = Play()
    _sealed(play, rank=900)
    tries = list(_tries(play, missing_ranks=0, seconds=600))
    assert tries[0][0] == 1.0
    pauses = _pauses(tries)
    assert max(pauses) == pytest.approx(30.0)
    assert len(tries) < 50
    # It writes no marker, even if all is there: hundreds of others would too.
    listings = [(at, turn) for at, turn in tries if turn is not Turn.READ]
    assert listings == [(256.0, Turn.LIST), (512.0, Turn.LIST)]


@pytest.mark.parametrize(("deputy", "pause_seconds"), [(1, 1.0), (2, 2.0), (3, 4.0), (8, 128.0)])
def test_each_deputy_lists_half_as_often_as_the_one_before(deputy: int, pause_seconds: float) -> None:
    play = Play()
    _sealed(play, rank=deputy)
    listings = _listings(play, missing_ranks=1, seconds=3.5 * pause_seconds)
    assert listings == [(count * pause_seconds, Turn.LIST) for count in (1, 2, 3)]


def test_a_deputy_writes_if_a_second_listing_finds_every_rank_and_still_no_marker() -> None:
    play = Play()
    _sealed(play, rank=1)
    assert _listings(play, missing_ranks=0, seconds=2.5) == [
        (1.0, Turn.LIST),
        (2.0, Turn.WRITE),
    ]


def test_the_place_in_line_is_the_number_of_agents_before_it() -> None:
    play = Play()
    for rank in (9, 8, 10, 11):
        play.announce("save", rank=rank, world_size=_WORLD, local_world_size=4)
    while play.phase("save") is not Phase.SEALED:
        play.answer(next(iter(play.in_flight)))
    # Two agents of four ranks come before it.
    assert _listings(play, missing_ranks=1, seconds=2.5) == [(2.0, Turn.LIST)]


@pytest.mark.parametrize(("rank", "longest_seconds"), [(0, 0.5), (1, 1.0), (900, 1.0)])
def test_when_the_pod_ends_every_agent_looks_often(rank: int, longest_seconds: float) -> None:
    play = Play()
    _sealed(play, rank=rank)
    play.now += 60
    play.feed(TerminationNoticed(at=play.now, deadline=play.now + 30, source="test"))
    tries = list(_tries(play, missing_ranks=1, seconds=20))
    assert tries[0][0] == 0.0
    assert max(_pauses(tries)) == longest_seconds


@pytest.mark.parametrize(("rank", "last"), [(5, Turn.WRITE), (900, Turn.READ)])
def test_a_deputy_whose_pod_ends_writes_before_it_is_too_late(rank: int, last: Turn) -> None:
    play = Play()
    play.feed(TerminationNoticed(at=play.now, deadline=play.now + 10, source="test"))
    _sealed(play, rank=rank)
    tries = list(_tries(play, missing_ranks=0, seconds=9))
    reserve_seconds = play.state.settings.termination.commit_reserve_seconds
    early = {turn for at, turn in tries if at < 10 - reserve_seconds}
    late = {turn for at, turn in tries if at >= 10 - reserve_seconds}
    assert early == {Turn.READ}
    assert late == {last}


def test_a_rank_that_announces_late_makes_the_manifest_larger() -> None:
    play = Play()
    _sealed(play, rank=3)
    play.in_flight.pop(_COMMIT, None)
    play.announce("save", rank=1, world_size=_WORLD)
    assert play.phase("save") is Phase.UPLOADING
    while not any(isinstance(command, WriteManifest) for command in play.in_flight.values()):
        play.answer(next(iter(play.in_flight)))
    (write,) = [command for command in play.in_flight.values() if isinstance(command, WriteManifest)]
    assert [one.rank for one in write.ranks] == [1, 3]
    play.answer(write.work)
    assert play.phase("save") is Phase.SEALED


def test_a_manifest_that_was_begun_before_another_rank_announced_seals_nothing() -> None:
    play = Play()
    play.announce("save", rank=3, world_size=_WORLD)
    smaller = WorkId(Operation.WRITE_MANIFEST, "save", number=1)
    while smaller not in play.in_flight:
        play.answer(next(iter(play.in_flight)))
    play.announce("save", (PART_BYTES,), rank=1, world_size=_WORLD)
    play.answer(smaller)
    assert play.phase("save") is Phase.UPLOADING
    play.finish("save")
    play.wait_until(lambda: _COMMIT in play.in_flight)
    assert len(play.state.checkpoints["save"].manifests()) == 2


def test_after_a_restart_a_sealed_save_is_tried_again() -> None:
    play = Play()
    _sealed(play, rank=900)
    play.in_flight.clear()
    play.feed(Started(at=play.now, fresh=False))
    play.answer(WorkId(Operation.RECONCILE, "save"))
    play.finish("save")
    assert play.phase("save") is Phase.RELEASED

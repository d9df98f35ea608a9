"""How often the agent asks for saves: by the objective, by what saves take, and by what they may cost."""

from dataclasses import replace

import pytest
from tests.core.play import Play

from keepstep_agent.core.agent import planner
from keepstep_agent.core.agent.commands import RequestSave
from keepstep_agent.core.agent.events import (
    ObjectiveGiven,
    RankRegistered,
    RanksSeen,
    SaveAborted,
    SaveBegun,
    TerminationNoticed,
)
from keepstep_agent.core.policies.recovery_objective import Objective, Obstacle, SaveTimes, plan_saves
from keepstep_agent.core.settings.values import Duration, ObjectiveSettings, Share

TIMES = SaveTimes(answer_seconds=1, write_seconds=9, commit_seconds=20, stall_seconds=2)


@pytest.mark.parametrize(
    ("recovery_point", "overhead", "times", "interval", "reached", "obstacle"),
    [
        (600, 0.01, None, 300, 600, None),
        (600, 0.01, TIMES, 511, 540, None),
        (200, 0.01, TIMES, 2 / 0.009, 2 / 0.009 + 29, Obstacle.OVERHEAD),
        (200, 0.0, TIMES, 151, 180, None),
        (50, 0.0, TIMES, 30, 59, Obstacle.COMMIT),
        (50, 0.0, replace(TIMES, write_seconds=40), 61, 121, Obstacle.WRITE),
        (60, 0.0, replace(TIMES, answer_seconds=300), 329, 358, Obstacle.ANSWER),
    ],
)
def test_the_interval_follows_from_the_objective_and_from_what_saves_take(
    recovery_point: float,
    overhead: float,
    times: SaveTimes | None,
    interval: float,
    reached: float,
    obstacle: Obstacle | None,
) -> None:
    plan = plan_saves(Objective(recovery_point_seconds=recovery_point, max_overhead=overhead), times)
    assert plan.interval_seconds == pytest.approx(interval)
    assert plan.recovery_point_seconds == pytest.approx(reached)
    assert plan.obstacle is obstacle


def playing(recovery_point: float = 600, *, node_rank: int = 0, rank: int | None = 0) -> Play:
    """A trainer came to life at 100."""
    play = Play()
    settings = ObjectiveSettings(recovery_point=Duration(recovery_point), max_overhead=Share(0.01))
    play.state.settings = replace(play.state.settings, objective=settings, node_rank=node_rank)
    if rank is not None:
        play.feed(RankRegistered(at=play.now, local_rank=0, rank=rank))
    play.feed(RanksSeen(at=play.now, alive=frozenset({0})))
    return play


def objective(play: Play) -> Objective | None:
    return play.state.save_requests.objective(play.state.settings.objective)


def requests_at(play: Play, now: float) -> bool:
    play.now = now
    return any(isinstance(command, RequestSave) for command in play.tick())


def save_at(play: Play, now: float, save: str, *, stall_seconds: float = 1) -> None:
    """It takes 10 s to be written, and 20 s to be committed."""
    play.now = now
    play.feed(SaveBegun(at=now, save=save, attempt="a", step=len(play.steps) + 1, size_bytes=1))
    play.now += 10
    play.announce(save, stall_seconds=stall_seconds)
    play.now += 20
    play.finish()


def test_the_first_save_is_asked_for_after_half_of_the_recovery_point() -> None:
    play = playing()
    assert not requests_at(play, 399)
    assert requests_at(play, 400)
    assert not requests_at(play, 401)


def test_the_next_one_leaves_time_to_be_written_and_committed() -> None:
    play = playing()
    assert requests_at(play, 400)
    save_at(play, 402, "one")
    # Less the margin, the writing and the commit, and the trainers' answer.
    assert planner.next_wake(play.state) == pytest.approx(402 + 600 - 60 - 30 - 2)


def test_a_save_that_the_program_makes_by_itself_moves_the_next_request() -> None:
    play = playing()
    save_at(play, 350, "own")
    assert not requests_at(play, 400)
    assert planner.next_wake(play.state) == pytest.approx(350 + 600 - 60 - 30)


def test_saves_take_no_larger_share_of_the_time_than_allowed() -> None:
    play = playing()
    save_at(play, 350, "slow", stall_seconds=8)
    assert planner.next_wake(play.state) == pytest.approx(350 + 8 / 0.009)
    plan = play.state.save_requests.plan(play.state.settings.objective)
    assert plan is not None
    assert plan.obstacle is Obstacle.OVERHEAD
    unknown = playing()
    save_at(unknown, 350, "all of the writing counts", stall_seconds=0)
    assert planner.next_wake(unknown.state) == pytest.approx(350 + 10 / 0.009)


def test_nothing_is_asked_for_while_a_save_is_written_or_on_its_way() -> None:
    play = playing()
    play.feed(SaveBegun(at=200, save="one", attempt="a", step=1, size_bytes=1))
    # Longer than room is kept for it.
    assert not requests_at(play, 1000)
    play.announce("one", stall_seconds=1)
    assert not requests_at(play, 1100)
    assert requests_at(play, 200 + 3 * 600), "it may never arrive"


def test_a_save_that_nobody_ends_holds_up_the_next_one_for_a_while_only() -> None:
    play = playing()
    play.feed(SaveBegun(at=200, save="one", attempt="a", step=1, size_bytes=1))
    assert not requests_at(play, 200 + 3 * 600 - 1)
    assert requests_at(play, 200 + 3 * 600)


def test_a_request_that_nobody_obeyed_is_repeated() -> None:
    play = playing()
    assert requests_at(play, 400)
    assert not requests_at(play, 999)
    assert requests_at(play, 1000)


def test_trainers_that_start_anew_are_asked_anew() -> None:
    play = playing()
    assert requests_at(play, 400)
    play.feed(RanksSeen(at=410, alive=frozenset()))
    play.feed(RanksSeen(at=500, alive=frozenset({0})))
    assert not requests_at(play, 799)
    assert requests_at(play, 800)


@pytest.mark.parametrize(
    ("node_rank", "rank", "asks"), [(0, 0, True), (1, 8, False), (0, None, True), (1, None, False)]
)
def test_only_the_agent_of_rank_0_asks(node_rank: int, rank: int | None, asks: bool) -> None:
    assert requests_at(playing(node_rank=node_rank, rank=rank), 400) is asks


def test_nothing_is_asked_for_without_an_objective_or_once_the_pod_ends() -> None:
    assert not requests_at(playing(0), 10_000)
    play = playing()
    play.feed(TerminationNoticed(at=200, deadline=10_000, source="test"))
    assert not requests_at(play, 400)


def test_a_program_may_set_the_objective_where_the_settings_do_not() -> None:
    play = playing(0)
    play.feed(ObjectiveGiven(at=100, recovery_point_seconds=60, max_overhead=0.0))
    assert objective(play) == Objective(recovery_point_seconds=60, max_overhead=0.01)
    operators = playing(600)
    operators.feed(ObjectiveGiven(at=100, recovery_point_seconds=60, max_overhead=0.5))
    assert objective(operators) == Objective(recovery_point_seconds=600, max_overhead=0.01)


def test_the_program_that_saves_by_itself_is_measured_too() -> None:
    play = playing()
    save_at(play, 200, "one")
    save_at(play, 900, "two")
    assert play.state.save_requests.history.oldest_seconds == pytest.approx(930 - 200)


def test_saves_that_fail_are_not_asked_for_again_and_again() -> None:
    play = playing()
    asked = 0
    while play.now < 100 + 3600:
        wake_at = planner.next_wake(play.state)
        assert wake_at is not None
        play.now = max(play.now, wake_at)
        if any(isinstance(command, RequestSave) for command in play.tick()):
            asked += 1
            play.feed(SaveBegun(at=play.now, save=f"s{asked}", attempt="a", step=asked, size_bytes=1))
            play.now += 30
            play.feed(SaveAborted(at=play.now, save=f"s{asked}"))
    # An hour allows 36 s.
    assert asked <= 2


def test_an_outage_does_not_count_as_the_time_that_commits_take() -> None:
    play = playing()
    save_at(play, 350, "one")
    play.now = 900
    play.announce("two", stall_seconds=1)
    (work,) = [one for one in play.in_flight if one.save == "two"]
    play.fail(work)
    assert play.state.storage_error
    play.now += 3000
    play.wait_until(lambda: bool(play.in_flight))
    play.finish()
    times = play.state.save_requests.history.times
    assert times is not None
    assert times.commit_seconds == pytest.approx(20)


def test_the_objective_of_a_program_ends_with_it() -> None:
    play = playing(0)
    play.feed(ObjectiveGiven(at=100, recovery_point_seconds=60, max_overhead=0.0))
    play.feed(RanksSeen(at=200, alive=frozenset()))
    assert objective(play) is None

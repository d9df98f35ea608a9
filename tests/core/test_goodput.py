"""Goodput and its losses, calculated by hand: each cause's seconds, and that they always sum up to the wall time."""

import random

import pytest
from tests.core.noted_lives import NotedLife, killed_and_resumed

from keepstep_agent.core.policies.goodput import Cause, GoodputReport, report_goodput, together
from keepstep_agent.core.policies.run_history import run_history
from keepstep_agent.core.stored.ledger import AgentLife, Alive, Resumed


def reported(*lives: NotedLife) -> GoodputReport:
    found = report_goodput(run_history([life.life for life in lives]))
    assert found.productive_seconds + sum(found.lost_seconds.values()) == pytest.approx(found.wall_seconds)
    return found


def lost(report: GoodputReport) -> dict[str, float]:
    """The causes that cost anything."""
    return {cause.value: seconds for cause, seconds in report.lost_seconds.items() if seconds}


def test_every_loss_of_a_run_that_was_killed_and_resumed_has_its_cause() -> None:
    found = reported(*killed_and_resumed())
    assert found.wall_seconds == 1000
    assert lost(found) == {
        "restore": 10 + 25,
        "start": 20 + 15,
        "stall": 5 + 5 + 4,
        "redone": 60,
        "waiting": 40,
        "drain": 90,
    }
    assert found.productive_seconds == 1000 - 35 - 35 - 14 - 60 - 40 - 90
    assert found.goodput == pytest.approx(0.726)


def test_steps_that_no_agent_heard_of_are_estimated_by_the_time_of_a_step() -> None:
    found = reported(*killed_and_resumed())
    assert found.step_seconds == 1.0
    assert (found.steps_lost_known, found.steps_lost) == (0, 60)


def test_a_just_in_time_save_kept_the_work_since_the_last_commit_before_the_notice() -> None:
    found = reported(*killed_and_resumed())
    # Of the second start's ranks: 1,380 to 1,900. What the first did after its step 200 was lost.
    assert (found.kept_steps, found.kept_seconds) == (520, 520)


def test_a_just_in_time_save_that_never_committed_kept_nothing() -> None:
    first, second = killed_and_resumed()
    second.entries = [entry for entry in second.entries if entry.number != 5]
    found = reported(first, second)
    assert (found.kept_steps, found.kept_seconds, found.committed) == (0, 0, 2)


def test_steps_that_were_announced_and_not_resumed_from_are_known_to_be_lost() -> None:
    first, second = killed_and_resumed()
    # Announced, and never committed.
    first.save(1280, 1282, 240)
    found = reported(first, second)
    assert (found.steps_lost_known, found.starts[1].lost_steps, found.starts[1].resumed_step) == (40, 40, 200)
    assert lost(found)["stall"] == 16
    assert lost(found)["redone"] == 58


def test_pods_of_one_start_are_one_interval_and_the_longest_stall_counts_once() -> None:
    pods = [NotedLife(f"pod-{number}", place=f"worker-{number}") for number in range(2)]
    for number, pod in enumerate(pods):
        pod.start(100 + number, restore=(90 + number, 100 + number), resumed=Resumed.NOTHING)
        pod.ranks(110 + 10 * number, 8)
        pod.save(200, 203 + 4 * number, 10)
        pod.commit(210, 10)
        pod.ranks(300 - 2 * number, 0)
        pod.end(310 + number)
    found = reported(*pods)
    assert (len(found.starts), found.starts[0].pods) == (1, 2)
    assert found.wall_seconds == 311 - 90
    assert lost(found) == {"restore": 11, "start": 19, "stall": 7, "drain": 11}


def test_a_replacement_of_a_pod_is_another_start_although_the_attempt_is_the_same() -> None:
    old, new = NotedLife("old", place="worker-0"), NotedLife("new", place="worker-0")
    old.start(100, restore=(90, 100), resumed=Resumed.NOTHING)
    old.ranks(110, 1)
    old.save(150, 150, 5)
    old.commit(190, 5)
    old.ranks(180, 0)
    old.end(200)
    # The old one still drains.
    new.resumes(196, 5, restore=(185, 195))
    new.ranks(205, 1)
    new.end(305)
    found = reported(old, new)
    assert len(found.starts) == 2
    assert lost(found) == {"restore": 20, "start": 20, "redone": 30, "drain": 5}


@pytest.mark.parametrize("attempt", ["", "job"])
def test_a_replacement_without_a_place_is_another_start_while_the_old_pod_drains(attempt: str) -> None:
    old, new = NotedLife("old", attempt=attempt), NotedLife("new", attempt=attempt)
    old.start(100, restore=(90, 100), resumed=Resumed.NOTHING)
    old.ranks(110, 1)
    old.save(36_100, 36_100, 5)
    old.commit(36_105, 5)
    old.ranks(36_110, 0)
    old.end(36_120)
    new.resumes(36_125, 5, restore=(36_110, 36_125))
    new.ranks(36_130, 1)
    new.end(36_230)
    found = reported(old, new)
    assert len(found.starts) == 2
    assert lost(found) == {"restore": 25, "start": 15, "redone": 10}


def test_pods_without_a_place_are_one_start_until_ranks_train_if_the_attempt_is_known() -> None:
    for attempt, starts in (("job", 1), ("", 2)):
        pods = [NotedLife(f"pod-{number}", attempt=attempt) for number in range(2)]
        for number, pod in enumerate(pods):
            pod.start(100 + number, restore=(90 + number, 100 + number), resumed=Resumed.NOTHING)
            pod.ranks(110, 1)
            pod.end(200)
        assert len(reported(*pods).starts) == starts


def test_an_agent_that_is_started_again_beside_its_ranks_continues_the_same_start() -> None:
    first, again = NotedLife("first"), NotedLife("again")
    first.start(100, start="one", restore=(90, 100), resumed=Resumed.NOTHING)
    first.ranks(110, 1)
    again.start(150, start="one", restore=(90, 100), resumed=Resumed.NOTHING)
    again.ranks(151, 1)
    again.ranks(200, 0)
    again.end(201)
    found = reported(first, again)
    assert len(found.starts) == 1
    assert lost(found) == {"restore": 10, "start": 10, "drain": 1}


def test_ranks_that_ended_before_their_agent_was_started_again_did_no_work_since() -> None:
    first, again = NotedLife("first"), NotedLife("again")
    first.start(100, start="one", restore=(90, 100), resumed=Resumed.NOTHING)
    first.ranks(110, 1)
    first.add(Alive, 140, ranks=1)
    again.start(150, start="one", restore=(90, 100), resumed=Resumed.NOTHING)
    again.end(201)
    assert lost(reported(first, again)) == {"restore": 10, "start": 10, "drain": 61}


def test_ranks_that_come_again_beside_their_agent_redo_what_followed_the_last_save() -> None:
    life = NotedLife("one")
    life.start(100, restore=(90, 100), resumed=Resumed.NOTHING)
    life.ranks(110, 2)
    life.save(150, 152, 40)
    life.ranks(170, 0)
    life.ranks(190, 2)
    life.ranks(290, 0)
    life.end(290)
    assert lost(reported(life)) == {"restore": 10, "start": 10 + 20, "stall": 2, "redone": 18}


def test_a_killed_agent_lived_until_its_last_sign() -> None:
    life = NotedLife("one")
    life.start(100, restore=(100, 100), resumed=Resumed.NOTHING)
    life.ranks(100, 1)
    life.add(Alive, 400, ranks=1)
    found = reported(life)
    assert (found.wall_seconds, found.productive_seconds, found.starts[0].ended) == (300, 300, False)


def test_work_since_a_slow_save_began_is_redone() -> None:
    first, second = NotedLife("first"), NotedLife("second")
    first.start(100, restore=(100, 100), resumed=Resumed.NOTHING)
    first.ranks(100, 1)
    first.save(240, 300, 10, stall_seconds=1.0)
    first.commit(305, 10)
    first.ranks(310, 0)
    first.ranks(310, 1)
    first.ranks(315, 0)
    first.end(315)
    second.resumes(320, 10, restore=(315, 320))
    second.ranks(320, 1)
    second.end(400)
    assert lost(reported(first, second)) == {"restore": 5, "stall": 1, "redone": 315 - 241}


def test_ranks_that_come_again_redo_what_followed_the_begin_of_a_slow_save() -> None:
    life = NotedLife("one")
    life.start(100, restore=(100, 100), resumed=Resumed.NOTHING)
    life.ranks(100, 1)
    life.save(140, 160, 40, stall_seconds=2.0)
    life.ranks(170, 0)
    life.ranks(190, 1)
    life.end(290)
    assert lost(reported(life)) == {"start": 20, "stall": 2, "redone": 170 - 142}


@pytest.mark.parametrize(
    ("resumed", "steps"), [(Resumed.SAVE, 50), (Resumed.NOTHING, 1_000_050), (Resumed.UNKNOWN, 20)]
)
def test_without_an_earlier_commit_a_just_in_time_save_kept_what_its_start_did(resumed: Resumed, steps: int) -> None:
    life = NotedLife("one")
    step = 1_000_000 if resumed is Resumed.SAVE else 0
    life.start(100, restore=(90, 100), resumed=resumed, step=step, save=f"save-{step}" if step else "")
    life.ranks(110, 1)
    life.save(140, 140, 1_000_030)
    life.notice(160)
    life.save(160, 162, 1_000_050, kind="just-in-time")
    life.commit(163, 1_000_050)
    life.end(170)
    found = reported(life)
    assert (found.kept_steps, found.kept_seconds) == (steps, 50)


def test_a_just_in_time_save_kept_no_work_of_before_the_step_that_its_start_resumed_from() -> None:
    first, second = killed_and_resumed()
    # Of the first start's save 200, which its agent had not written down, only the second one's resume tells.
    first.entries = [entry for entry in first.entries if getattr(entry, "save", "") != "save-200"]
    found = reported(first, second)
    assert (found.kept_steps, found.kept_seconds) == (520, 520)


def test_work_since_the_begin_of_the_last_committed_save_is_kept() -> None:
    life = NotedLife("one")
    life.start(100, restore=(100, 100), resumed=Resumed.NOTHING)
    life.ranks(100, 1)
    life.save(120, 150, 20, stall_seconds=2.0)
    life.commit(155, 20)
    life.notice(200)
    life.save(200, 205, 100, kind="just-in-time")
    life.commit(206, 100)
    life.end(210)
    assert reported(life).kept_seconds == 200 - 122


def test_a_start_that_begins_from_nothing_redoes_all_that_was_before() -> None:
    first, second = killed_and_resumed()
    second.entries.pop(0)
    second.start(1366, restore=(1340, 1365), resumed=Resumed.NOTHING)
    found = reported(first, second)
    assert lost(found)["redone"] == 1300 - 1030 - 10
    assert found.steps_lost_known == 200


def test_a_start_that_cannot_tell_is_taken_to_resume_from_the_newest_commit_before_it() -> None:
    first, second = killed_and_resumed()
    second.entries.pop(0)
    second.start(1366, restore=(1340, 1365))
    assert lost(reported(first, second))["redone"] == 60


def test_two_starts_from_a_save_that_nobody_wrote_down_lose_the_first_ones_work() -> None:
    first, second, third = (NotedLife(name) for name in ("first", "second", "third"))
    first.start(100, restore=(100, 100), resumed=Resumed.NOTHING)
    first.ranks(110, 1)
    second.resumes(210, 50, restore=(200, 210))
    second.ranks(220, 1)
    second.save(250, 252, 60)
    second.ranks(280, 1)
    third.resumes(310, 50, restore=(300, 310))
    third.ranks(320, 1)
    third.end(400)
    found = reported(first, second, third)
    assert [start.lost_steps for start in found.starts] == [0, 0, 10]
    assert lost(found)["redone"] == 280 - 220 - 2


def test_work_after_a_later_step_is_lost_if_nobody_wrote_down_the_save_that_was_resumed() -> None:
    first, second = killed_and_resumed()
    first.entries = [entry for entry in first.entries if getattr(entry, "save", "") != "save-200"]
    first.save(1280, 1282, 240)
    found = reported(first, second)
    assert (found.steps_lost_known, lost(found)["redone"]) == (40, 1300 - 1282)


def test_a_program_without_a_client_trains_from_its_restore_to_the_last_sign() -> None:
    life = NotedLife("one")
    life.start(100, restore=(90, 100), resumed=Resumed.NOTHING)
    life.save(None, 1_700_000_000, 1_700_000_000, kind="snapshot")
    found = reported(life)
    assert (lost(found), found.steps_lost) == ({"restore": 10}, 0)


def test_a_stall_that_the_client_measured_beats_the_time_until_the_announcement() -> None:
    life = NotedLife("one")
    life.start(100, restore=(100, 100), resumed=Resumed.NOTHING)
    life.ranks(100, 1)
    life.save(200, 260, 10, stall_seconds=3.0)
    life.end(300)
    assert lost(reported(life)) == {"stall": 3}


def test_an_empty_ledger_has_no_time_and_no_goodput() -> None:
    found = reported()
    assert (found.wall_seconds, found.goodput, found.starts) == (0, 0, ())


def test_runs_together_add_up() -> None:
    one = reported(*killed_and_resumed())
    both = together([one, one])
    assert (both.wall_seconds, both.goodput, both.steps_lost) == (2000, one.goodput, 120)
    assert both.lost_seconds[Cause.REDONE] == 120


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_missing_the_causes_sum_up_and_the_order_does_not_matter(seed: int) -> None:
    chance = random.Random(seed)
    lives = killed_and_resumed()
    for life in lives:
        life.entries = [entry for entry in life.entries if chance.random() < 0.6]
    whole = reported(*lives)
    # Object by object, some of them twice, in any order.
    pieces = [
        AgentLife(agent=life.agent, attempt="job", place="", node_rank=0, entries=(entry,))
        for life in [*lives, *lives]
        for entry in life.entries
    ]
    chance.shuffle(pieces)
    assert report_goodput(run_history(pieces)) == whole
    assert all(seconds >= 0 for seconds in whole.lost_seconds.values())


def test_what_the_program_counts_is_that_of_the_newest_committed_checkpoint() -> None:
    life = NotedLife("only")
    life.start(1000, restore=(1000, 1000), resumed=Resumed.NOTHING)
    life.ranks(1000, 1)
    for step, done in ((10, 100.0), (20, 200.0), (30, 300.0)):
        life.save(1000 + step, 1001 + step, step, units={"tokens": done})
    life.commit(1015, 10)
    life.commit(1025, 20)
    life.end(1100)
    found = report_goodput(run_history([life.life]))
    assert found.units == {"tokens": 200.0}
    assert together([found, found]).units == {"tokens": 400.0}


def two_stages(*, resumed: Resumed) -> list[NotedLife]:
    """Stage one saves steps 500 and 1,000; stage two, in a directory of its own, saves steps 40 and 80, and is killed.

    Steps take 1 s. The next start goes on with stage two, and saves step 100 just in time.
    """
    first, second = NotedLife("first"), NotedLife("second")
    first.start(1000, restore=(1000, 1000), resumed=Resumed.NOTHING)
    first.ranks(1000, 1)
    for step, at, output in ((500, 1500, "one"), (1000, 2000, "one"), (40, 2040, "two"), (80, 2080, "two")):
        first.save(at, at, step, output=output)
        first.commit(at + 1, step)
    first.add(Alive, 2095, ranks=1, step=95)
    second.start(2200, restore=(2190, 2200), resumed=resumed, step=80, save="save-80")
    second.ranks(2200, 1)
    second.notice(2220)
    second.save(2220, 2220, 100, kind="just-in-time", output="two")
    second.commit(2221, 100)
    second.end(2222)
    return [first, second]


@pytest.mark.parametrize("resumed", [Resumed.SAVE, Resumed.UNKNOWN])
def test_a_second_training_of_a_run_is_not_measured_by_the_steps_of_the_first(resumed: Resumed) -> None:
    found = reported(*two_stages(resumed=resumed))
    assert (found.steps_lost_known, found.starts[1].lost_steps) == (15, 15)
    # From step 80 on, which the second start resumed from.
    assert (found.kept_steps, found.kept_seconds) == (20, 20)
    assert found.step_seconds == 1.0


def test_the_first_just_in_time_save_of_a_second_training_kept_all_its_steps() -> None:
    life = NotedLife("only")
    life.resumes(1000, 500, restore=(1000, 1000))
    life.ranks(1000, 1)
    life.save(1100, 1100, 500, output="one")
    life.commit(1101, 500)
    life.notice(1130)
    life.save(1130, 1130, 30, kind="just-in-time", output="two")
    life.commit(1131, 30)
    life.end(1132)
    found = reported(life)
    assert found.kept_steps == 30


def test_what_a_second_training_counts_is_shown_although_the_first_had_more_steps() -> None:
    life = NotedLife("only")
    life.start(1000, restore=(1000, 1000), resumed=Resumed.NOTHING)
    life.ranks(1000, 1)
    for at, step, output in ((1010, 500, "one"), (1020, 20, "two")):
        life.save(at, at, step, output=output, units={"tokens": float(step)})
        life.commit(at + 1, step)
    life.end(1100)
    assert reported(life).units == {"tokens": 20.0}


def test_a_training_with_two_output_directories_kept_what_followed_the_last_commit_in_either() -> None:
    """As one with a ModelCheckpoint for the best and one for all."""
    first, second = NotedLife("first"), NotedLife("second")
    first.start(1000, restore=(1000, 1000), resumed=Resumed.NOTHING)
    first.ranks(1000, 1)
    for step, output in ((500, "best"), (600, "steps"), (900, "steps")):
        first.save(1000 + step, 1000 + step, step, output=output)
        first.commit(1001 + step, step)
    second.resumes(2000, 900, restore=(1990, 2000))
    second.ranks(2000, 1)
    second.notice(2050)
    second.save(2050, 2050, 950, kind="just-in-time", output="best")
    second.commit(2051, 950)
    second.end(2052)
    assert reported(first, second).kept_steps == 50

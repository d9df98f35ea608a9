"""How far the trainers are: the rate of their steps, and when they count as stuck."""

from dataclasses import replace

import pytest
from tests.core.play import Play

from keepstep_agent.core.agent.events import StepSeen, TerminationNoticed
from keepstep_agent.core.agent.reducer import advance
from keepstep_agent.core.policies.progress import Progress, StepSign
from keepstep_agent.core.settings.values import Duration, ProgressSettings

TIMEOUT_SECONDS = 1800.0


def progress(*signs: tuple[float, int]) -> Progress:
    found = Progress()
    for at, step in signs:
        found.note(StepSign(at=at, step=step))
    return found


@pytest.mark.parametrize(
    ("signs", "now", "rate"),
    [
        ((), 0, 0.0),
        (((0, 10),), 5, 0.0),
        (((0, 10), (10, 40)), 12, 3.0),
        # Only about the last minute counts.
        (((0, 0), (10, 1000), (60, 1050), (70, 1060), (80, 1070)), 80, 1.0),
        # A step of two minutes has a rate too, also just before the next one.
        (((0, 1), (120, 2), (240, 3)), 355, 1 / 120),
        # They resumed from an earlier checkpoint.
        (((0, 500), (10, 520), (60, 410), (70, 430)), 70, 2.0),
        # An evaluation: its batches are signs of life, and no steps.
        (((0, 100), (20, 140), (40, 140)), 40, 1.0),
        # Of trainers that stand still the rate fades.
        (((0, 0), (60, 60)), 180, 0.5),
    ],
)
def test_steps_per_second_are_those_of_about_the_last_minute(
    signs: tuple[tuple[float, int], ...], now: float, rate: float
) -> None:
    assert progress(*signs).steps_per_second(now) == pytest.approx(rate)


def test_trainers_are_stuck_after_the_time_out_without_a_sign_and_no_sooner() -> None:
    found = progress((100.0, 7))
    assert not found.is_stuck(100.0 + TIMEOUT_SECONDS - 1, TIMEOUT_SECONDS)
    assert found.is_stuck(100.0 + TIMEOUT_SECONDS, TIMEOUT_SECONDS)
    found.note(StepSign(at=1900.0, step=7))
    assert not found.is_stuck(1901.0, TIMEOUT_SECONDS)


def test_without_a_time_out_or_without_steps_nobody_is_ever_stuck() -> None:
    assert not progress((0.0, 7)).is_stuck(1e9, 0.0)
    assert not progress().is_stuck(1e9, TIMEOUT_SECONDS)
    gone = progress((0.0, 7))
    gone.note(None)
    assert not gone.is_stuck(1e9, TIMEOUT_SECONDS)
    assert gone.age_seconds(1e9) is None


def test_a_trainer_that_ends_after_a_termination_notice_is_not_stuck() -> None:
    play = Play()
    play.state.settings = replace(
        play.state.settings, progress=ProgressSettings(step_timeout=Duration(TIMEOUT_SECONDS))
    )
    sign = StepSign(at=0.0, step=3)
    advance(play.state, StepSeen(at=1.0, newest=sign))
    assert not play.state.progress.stuck
    advance(play.state, StepSeen(at=TIMEOUT_SECONDS, newest=sign))
    assert play.state.progress.stuck
    advance(play.state, TerminationNoticed(at=TIMEOUT_SECONDS + 1, deadline=None, source="test"))
    advance(play.state, StepSeen(at=TIMEOUT_SECONDS + 2, newest=sign))
    assert not play.state.progress.stuck

"""When a periodic save is due: by steps, and by a duration."""

import logging
from datetime import timedelta
from typing import Any

import numpy
import pytest

from keepstep.errors import UsageError
from keepstep.save_schedule import SaveSchedule, parse_interval


def due_at(schedule: SaveSchedule, steps: list[int], every: int) -> list[int]:
    found = []
    for step in steps:
        schedule.at(step)
        if schedule.is_due(every):
            schedule.saved(step, 0.0)
            found.append(step)
    return found


@pytest.mark.parametrize(
    ("every", "meant"),
    [
        (0, 0),
        (100, 100),
        (100.0, 100),
        (numpy.int64(100), 100),
        ("100", 100),
        ("90s", timedelta(seconds=90)),
        ("10m", timedelta(minutes=10)),
        ("1.5 h", timedelta(minutes=90)),
        (timedelta(minutes=3), timedelta(minutes=3)),
    ],
)
def test_an_interval_is_steps_or_a_duration(every: Any, meant: int | timedelta) -> None:
    assert parse_interval(every) == meant


@pytest.mark.parametrize(
    "every", [-1, 2.5, "", "ten minutes", "10 days", "-3m", "0.1s", timedelta(0), "²", None, [], "9" * 20 + "h"]
)
def test_nonsense_as_an_interval_is_refused_with_a_hint(every: Any) -> None:
    with pytest.raises(UsageError) as raised:
        parse_interval(every)
    assert 'every="10m"' in raised.value.hint


def test_every_hundredth_step_is_due_once() -> None:
    schedule = SaveSchedule(0.0)
    assert due_at(schedule, [step for step in range(1, 301) for _ in range(3)], 100) == [100, 200, 300]


def test_a_program_that_asks_at_odd_steps_saves_at_the_first_past_each_multiple() -> None:
    """One that asks once per epoch of 977 steps would never meet a multiple of 100."""
    assert due_at(SaveSchedule(0.0), list(range(1, 1000, 33)), 100) == [100, *range(232, 1000, 99)]


def test_the_step_that_was_resumed_from_is_not_due_again() -> None:
    schedule = SaveSchedule(0.0)
    schedule.saved(200, 0.0)
    assert due_at(schedule, [200, 201, 299, 300], 100) == [300]


def test_the_first_call_after_a_resume_is_past_the_step_that_was_resumed_from() -> None:
    schedule = SaveSchedule(0.0)
    schedule.saved(95, 0.0)
    assert due_at(schedule, [105, 115, 195, 205], 100) == [105, 205]


def test_a_save_that_found_no_room_stays_due_at_its_step() -> None:
    schedule = SaveSchedule(0.0)
    for step in (99, 100, 100):
        schedule.at(step)
    assert schedule.is_due(100)


def test_zero_steps_means_no_periodic_save() -> None:
    assert due_at(SaveSchedule(0.0), list(range(1000)), 0) == []


def test_a_duration_counts_from_the_last_save_of_any_kind() -> None:
    schedule, every = SaveSchedule(100.0), timedelta(seconds=60)
    assert not schedule.timer_expired(every, 159.9)
    assert schedule.timer_expired(every, 160.0)
    assert not schedule.timer_expired(every, 161.0)
    schedule.saved(7, 200.0)
    assert not schedule.timer_expired(every, 259.9)
    assert schedule.timer_expired(every, 260.0)


def test_a_counter_that_does_not_move_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "keepstep")
    schedule = SaveSchedule(0.0)
    for step in (1, 2):
        for _ in range(5000):
            schedule.at(step)
    assert [record.args for record in caplog.records] == [(1000, 1)]


def test_a_program_that_is_told_to_save_and_never_does_hears_of_it_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "keepstep")
    schedule = SaveSchedule(0.0)
    for step in range(10):
        schedule.at(step)
        schedule.told_to_save()
    assert len(caplog.records) == 1


@pytest.mark.parametrize("saves_every", [1, 2])
def test_a_program_that_saves_and_asks_often_hears_nothing(caplog: pytest.LogCaptureFixture, saves_every: int) -> None:
    caplog.set_level(logging.WARNING, "keepstep")
    schedule = SaveSchedule(0.0)
    for step in range(10):
        schedule.at(step)
        for _ in range(5):
            schedule.told_to_save()
        if step % saves_every == 0:
            schedule.saved(step, 0.0)
    assert caplog.records == []

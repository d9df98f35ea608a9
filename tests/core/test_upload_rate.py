"""Bytes made durable per busy second, with old seconds fading out."""

import pytest

from keepstep_agent.core.agent.state import UploadRate


def test_nothing_measured_is_no_rate() -> None:
    assert UploadRate().bytes_per_second == 0.0


def test_a_steady_stream_is_measured_exactly() -> None:
    rate = UploadRate()
    rate.note(0.0, was_busy=False, stored_bytes=0)
    for second in range(1, 100):
        rate.note(float(second), was_busy=True, stored_bytes=500)
    assert rate.bytes_per_second == pytest.approx(500, rel=0.05)


def test_idle_time_does_not_lower_the_rate() -> None:
    rate = UploadRate()
    rate.note(0.0, was_busy=False, stored_bytes=0)
    rate.note(10.0, was_busy=True, stored_bytes=1000)
    rate.note(5000.0, was_busy=False, stored_bytes=0)
    assert rate.bytes_per_second == pytest.approx(100)


def test_busy_seconds_without_bytes_lower_it() -> None:
    rate = UploadRate()
    rate.note(0.0, was_busy=False, stored_bytes=0)
    rate.note(10.0, was_busy=True, stored_bytes=1000)
    rate.note(60.0, was_busy=True, stored_bytes=0)
    assert rate.bytes_per_second < 40


def test_the_wait_for_parts_that_land_in_bursts_does_not_lower_it() -> None:
    rate = UploadRate()
    rate.note(0.0, was_busy=False, stored_bytes=0)
    at = 0.0
    for _ in range(5):
        at += 8.0
        for _ in range(8):
            rate.note(at, was_busy=True, stored_bytes=1000)
        for second in range(8):
            rate.note(at + second, was_busy=True, stored_bytes=0)
            assert rate.bytes_per_second == pytest.approx(1000, rel=0.01)


def test_what_is_old_fades_out() -> None:
    rate = UploadRate()
    rate.note(0.0, was_busy=False, stored_bytes=0)
    for second in range(1, 61):
        rate.note(float(second), was_busy=True, stored_bytes=1000)
    for second in range(61, 121):
        rate.note(float(second), was_busy=True, stored_bytes=100)
    assert rate.bytes_per_second == pytest.approx(100, rel=0.2)


def test_a_clock_that_goes_back_is_no_time() -> None:
    rate = UploadRate()
    rate.note(10.0, was_busy=False, stored_bytes=0)
    rate.note(11.0, was_busy=True, stored_bytes=100)
    rate.note(5.0, was_busy=True, stored_bytes=0)
    assert rate.bytes_per_second == pytest.approx(100)


def test_a_few_small_files_say_nothing_of_the_wire() -> None:
    rate = UploadRate()
    rate.note(0.0, was_busy=False, stored_bytes=0)
    rate.note(0.5, was_busy=True, stored_bytes=1000)
    assert rate.bytes_per_second == pytest.approx(2000)
    assert not rate.is_certain

    for second in range(1, 5):
        rate.note(0.5 + second, was_busy=True, stored_bytes=2000)
    assert rate.is_certain
    assert rate.bytes_per_second == pytest.approx(2000, rel=0.05)

"""How long to wait after a failure, and when not to try again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep_agent.core.errors import REFUSALS, RETRYABLE, ErrorKind, retry_delay_seconds


@pytest.mark.parametrize("kind", sorted(set(ErrorKind) - RETRYABLE))
def test_what_no_second_try_mends_is_not_tried_again(kind: ErrorKind) -> None:
    assert retry_delay_seconds(kind, 1, 0.0) is None


def test_an_object_that_the_stores_retention_protects_is_a_refusal_that_is_tried_again() -> None:
    assert ErrorKind.OBJECT_LOCKED in REFUSALS & RETRYABLE


@given(kind=st.sampled_from(sorted(RETRYABLE)), attempt=st.integers(1, 10_000), jitter=st.floats(0, 0.999))
def test_a_retry_never_comes_at_once_nor_later_than_half_a_minute(kind: ErrorKind, attempt: int, jitter: float) -> None:
    delay_seconds = retry_delay_seconds(kind, attempt, jitter)
    assert delay_seconds is not None
    assert 0.1 <= delay_seconds <= 30.0


@given(kind=st.sampled_from(sorted(RETRYABLE)), attempt=st.integers(1, 50), jitter=st.floats(0, 0.999))
def test_delays_grow_with_every_failure(kind: ErrorKind, attempt: int, jitter: float) -> None:
    now, later = retry_delay_seconds(kind, attempt, jitter), retry_delay_seconds(kind, attempt + 1, jitter)
    assert now is not None
    assert later is not None
    assert later >= now


def test_the_first_retries_double() -> None:
    delays = [retry_delay_seconds(ErrorKind.TIMED_OUT, attempt, 0.0) for attempt in range(1, 5)]
    assert delays == pytest.approx([0.1, 0.2, 0.4, 0.8])


def test_what_a_person_must_mend_is_asked_for_less_often() -> None:
    assert retry_delay_seconds(ErrorKind.ACCESS_DENIED, 99, 0.0) == 15.0
    assert retry_delay_seconds(ErrorKind.TIMED_OUT, 99, 0.0) == 5.0


def test_jitter_spreads_over_the_upper_half() -> None:
    earliest, latest = (retry_delay_seconds(ErrorKind.TIMED_OUT, 99, jitter) for jitter in (0.0, 1.0))
    assert (earliest, latest) == (5.0, 10.0)

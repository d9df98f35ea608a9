"""File -> parts, within every limit that S3 has."""

from hypothesis import given
from hypothesis import strategies as st

from mooring_agent.core.part_plan import MAX_PARTS, MIN_PART_BYTES, part_size_for, plan
from mooring_agent.core.settings import GIB, MIB

_LARGEST_PART_BYTES = 5 * GIB
_LARGEST_OBJECT_BYTES = int(48.8 * 1024 * GIB)

# Few parts for the exact cover, so that a test makes no ten thousand objects a hundred times.
_sizes = st.one_of(st.integers(0, 64 * MIB), st.integers(0, _LARGEST_OBJECT_BYTES))


@given(size_bytes=_sizes, preferred_bytes=st.integers(1, _LARGEST_PART_BYTES))
def test_every_object_that_s3_can_hold_gets_parts_that_s3_accepts(size_bytes: int, preferred_bytes: int) -> None:
    part_size_bytes = part_size_for(size_bytes, preferred_bytes)
    assert MIN_PART_BYTES <= part_size_bytes <= _LARGEST_PART_BYTES
    assert -(-size_bytes // part_size_bytes) <= MAX_PARTS


@given(size_bytes=_sizes, preferred_bytes=st.integers(MIN_PART_BYTES, GIB))
def test_a_preferred_part_size_is_kept_unless_it_would_need_too_many_parts(
    size_bytes: int, preferred_bytes: int
) -> None:
    fits = size_bytes <= preferred_bytes * MAX_PARTS
    assert (part_size_for(size_bytes, preferred_bytes) == preferred_bytes) is fits


@given(size_bytes=st.integers(0, 200_000), part_size_bytes=st.integers(50, 100_000))
def test_the_parts_cover_the_file_exactly_and_in_order(size_bytes: int, part_size_bytes: int) -> None:
    parts = plan(size_bytes, part_size_bytes)
    assert [part.number for part in parts] == list(range(1, len(parts) + 1))
    offset = 0
    for part in parts:
        assert part.offset_bytes == offset
        offset += part.size_bytes
    assert offset == size_bytes
    assert all(part.size_bytes == part_size_bytes for part in parts[:-1])
    assert all(0 < part.size_bytes <= part_size_bytes for part in parts)


def test_an_empty_file_has_no_parts() -> None:
    assert plan(0, MIN_PART_BYTES) == ()


def test_the_largest_object_takes_all_the_parts_there_are() -> None:
    size_bytes = _LARGEST_OBJECT_BYTES
    assert len(plan(size_bytes, part_size_for(size_bytes, 32 * MIB))) <= MAX_PARTS

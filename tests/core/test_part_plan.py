"""File -> parts, within every limit that S3 has and as large as the wire bears."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from tests.core.play import Play

from keepstep_agent.core.agent.commands import Stage
from keepstep_agent.core.agent.events import Staged
from keepstep_agent.core.agent.work import Operation, WorkId
from keepstep_agent.core.limits import PARTS_PER_FILE
from keepstep_agent.core.settings.values import GIB, MIB, TransferSettings
from keepstep_agent.core.stored.packs_and_parts import MIN_PART_BYTES, part_size_for, plan, preferred_part_size

_LARGEST_PART_BYTES = 5 * GIB
_LARGEST_OBJECT_BYTES = int(48.8 * 1024 * GIB)

# Few parts for the exact cover, so that a test makes no ten thousand objects a hundred times.
_sizes = st.one_of(st.integers(0, 64 * MIB), st.integers(0, _LARGEST_OBJECT_BYTES))


@given(size_bytes=_sizes, preferred_bytes=st.integers(1, _LARGEST_PART_BYTES))
def test_every_object_that_s3_can_hold_gets_parts_that_s3_accepts(size_bytes: int, preferred_bytes: int) -> None:
    part_size_bytes = part_size_for(size_bytes, preferred_bytes)
    assert MIN_PART_BYTES <= part_size_bytes <= _LARGEST_PART_BYTES
    assert -(-size_bytes // part_size_bytes) <= PARTS_PER_FILE


@given(size_bytes=_sizes, preferred_bytes=st.integers(MIN_PART_BYTES, GIB))
def test_a_preferred_part_size_is_kept_unless_it_would_need_too_many_parts(
    size_bytes: int, preferred_bytes: int
) -> None:
    fits = size_bytes <= preferred_bytes * PARTS_PER_FILE
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
    assert len(plan(size_bytes, part_size_for(size_bytes, 32 * MIB))) <= PARTS_PER_FILE


@given(configured_bytes=st.integers(1, GIB), bytes_per_second=st.floats(0, 1e12), window=st.integers(1, 64))
def test_a_window_of_parts_lands_within_five_seconds_where_parts_of_8_mib_allow_it(
    configured_bytes: int, bytes_per_second: float, window: int
) -> None:
    size_bytes = preferred_part_size(configured_bytes, bytes_per_second, window, is_certain=True, expected_bytes=0)
    assert min(configured_bytes, 8 * MIB) <= size_bytes <= configured_bytes
    if bytes_per_second:
        assert size_bytes < 16 * MIB or size_bytes * window <= 5 * bytes_per_second
        # No smaller than that asks for.
        assert size_bytes == configured_bytes or 2 * (size_bytes + 1) * window > 5 * bytes_per_second


@given(
    configured_bytes=st.integers(1, 2 * GIB),
    bytes_per_second=st.floats(0, 1e12),
    window=st.integers(1, 64),
    expected_bytes=st.integers(0, 1 << 42),
)
def test_parts_grow_with_the_rate_while_a_checkpoint_fills_four_windows_of_them(
    configured_bytes: int, bytes_per_second: float, window: int, expected_bytes: int
) -> None:
    size_bytes = preferred_part_size(
        configured_bytes, bytes_per_second, window, is_certain=False, expected_bytes=expected_bytes
    )
    assert configured_bytes <= size_bytes <= 4 * configured_bytes
    if size_bytes > configured_bytes:
        assert size_bytes <= GIB
        assert size_bytes * window * 4 <= expected_bytes
        # No larger than a second asks for.
        assert size_bytes // 2 * window < bytes_per_second


@given(configured_bytes=st.integers(1, GIB), window=st.integers(1, 64), is_certain=st.booleans())
def test_while_nothing_was_measured_parts_have_the_configured_size(
    configured_bytes: int, window: int, is_certain: bool
) -> None:
    size_bytes = preferred_part_size(configured_bytes, 0.0, window, is_certain=is_certain, expected_bytes=1 << 42)
    assert size_bytes == configured_bytes


def test_a_slow_wire_gets_smaller_parts_and_a_fast_one_larger_for_the_next() -> None:
    play = Play(max_concurrency=2)
    play.state.settings = replace(
        play.state.settings, transfer=TransferSettings(part_size_bytes=32 * MIB, max_concurrency=2)
    )

    def store(save: str, *, seconds_each: float) -> int:
        """The part size with which it is staged, and keeps while it is stored."""
        play.announce_only(save, (512 * MIB,))
        stage = play.in_flight[WorkId(Operation.STAGE, save, 0)]
        assert isinstance(stage, Stage)
        play.finish(save, seconds_each=seconds_each)
        (staged,) = [event for event in play.journal if isinstance(event, Staged) and event.work.save == save]
        assert staged.part_size_bytes == stage.part_size_bytes
        return stage.part_size_bytes

    assert store("first", seconds_each=4.0) == 32 * MIB  # 8 MiB per second: a window takes eight
    assert store("second", seconds_each=20.0) == 16 * MIB
    assert store("third", seconds_each=0.3) == 8 * MIB
    assert store("fourth", seconds_each=0.3) == 32 * MIB
    sizes = [store(f"fast-{number}", seconds_each=0.1) for number in range(40)]
    assert sizes == sorted(sizes)
    assert sizes[0] == 32 * MIB
    assert sizes[-1] == 64 * MIB

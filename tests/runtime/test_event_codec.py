"""Durable events to journal records and back, whatever they hold."""

from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep_agent.core.agent.events import DURABLE, Announced, DurableEvent, Exited, RankRegistered
from keepstep_agent.core.agent.work import WorkId
from keepstep_agent.core.limits import LOCAL_RANKS
from keepstep_agent.core.model import Kind, SaveInfo
from keepstep_agent.runtime.engine.event_codec import UnknownRecordError, decode_event, encode_event

_UNSIGNED_64_BITS = 2**64 - 1

st.register_type_strategy(float, st.floats(allow_nan=False, allow_infinity=False))
st.register_type_strategy(int, st.integers(0, _UNSIGNED_64_BITS))
# Hypothesis does not know the limits of an annotated type.
_within = st.integers(1, LOCAL_RANKS - 1)
st.register_type_strategy(SaveInfo, st.builds(SaveInfo, step=_within, world_size=_within))
st.register_type_strategy(Announced, st.builds(Announced, rank=_within, local_world_size=_within))
st.register_type_strategy(RankRegistered, st.builds(RankRegistered, local_rank=_within, rank=_within))


@pytest.mark.parametrize("kind", DURABLE, ids=lambda kind: kind.__name__)
def test_every_durable_event_comes_back_as_it_was(kind: type[DurableEvent]) -> None:
    @settings(max_examples=40, deadline=None)
    @given(event=st.from_type(kind))
    def comes_back(event: DurableEvent) -> None:
        again = decode_event(encode_event(event))
        assert again == event
        assert type(getattr(again, "work", WorkId)) is type(getattr(event, "work", WorkId))

    comes_back()


def test_a_record_is_one_line_of_json_with_the_event_s_name() -> None:
    assert encode_event(Exited(at=1.5)) == _record('{"body":{"at":1.5},"event":"exited","format":1')


def _record(content: str) -> bytes:
    return content.encode() + b',"crc32":"%08x"}\n' % crc32(content.encode())


@pytest.mark.parametrize(
    "record",
    [
        b"",
        b"not json",
        _record('{"body":{},"event":"Invented","format":1'),
        _record('{"body":{"at":"soon"},"event":"exited","format":1'),
        _record('{"body":{},"event":"exited","format":1'),
        _record('{"body":{"at":1.0},"event":"ticked","format":1'),
        _record('{"body":{"at":1.0},"event":"exited","format":2'),
        _record('{"body":{"at":1.0},"event":"exited"'),
        _record('{"body":' + "[" * 100_000 + "]" * 100_000 + ',"event":"exited","format":1'),
        b'{"body":{"at":1.0},"event":"exited","format":1}',
        b"\xff\xfe",
    ],
)
def test_a_record_of_another_version_is_told_from_one_of_ours(record: bytes) -> None:
    with pytest.raises(UnknownRecordError):
        decode_event(record)


def test_a_field_that_a_later_version_added_does_no_harm() -> None:
    assert decode_event(_record('{"body":{"at":1.5,"mood":"good"},"event":"exited","format":1')) == Exited(at=1.5)


def test_a_world_that_is_too_large_does_not_come_back_from_a_journal() -> None:
    info = SaveInfo(save="save", name="checkpoint-1", step=1, kind=Kind.PERIODIC, world_size=2**32 - 1)
    record = encode_event(Announced(at=1.0, info=info, rank=0, path="/volume/a", files=(), local_world_size=1))
    with pytest.raises(UnknownRecordError, match="world_size"):
        decode_event(record)


def test_a_record_of_which_one_bit_changed_by_itself_is_not_believed() -> None:
    info = SaveInfo(save="save", name="checkpoint-1", step=1, kind=Kind.PERIODIC, world_size=2)
    record = encode_event(Announced(at=1.0, info=info, rank=0, path="/volume/a", files=(), local_world_size=1))
    for bit in range(8 * len(record)):
        changed = bytearray(record)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(UnknownRecordError):
            decode_event(bytes(changed))

"""Durable events to journal records and back, whatever they hold."""

import tracemalloc
import zlib
from collections.abc import Callable
from typing import Final
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep_agent.core.agent.events import DURABLE, Announced, DurableEvent, Exited, RankRegistered
from keepstep_agent.core.agent.work import WorkId
from keepstep_agent.core.file_lists import SnapshotContent, StagedFiles, staged_files
from keepstep_agent.core.limits import LOCAL_RANKS
from keepstep_agent.core.model import Fingerprint, Kind, PinMethod, SaveInfo, SourceFile, StagedFile
from keepstep_agent.runtime.engine import event_codec
from keepstep_agent.runtime.engine.event_codec import (
    UnknownRecordError,
    decode_announcement,
    decode_event,
    encode_announcement,
    encode_event,
    is_large,
    save_of_record,
)

_UNSIGNED_64_BITS = 2**64 - 1

st.register_type_strategy(float, st.floats(allow_nan=False, allow_infinity=False))
st.register_type_strategy(int, st.integers(0, _UNSIGNED_64_BITS))
# Hypothesis does not know the limits of an annotated type.
_within = st.integers(1, LOCAL_RANKS - 1)
st.register_type_strategy(SaveInfo, st.builds(SaveInfo, step=_within, world_size=_within))
st.register_type_strategy(Announced, st.builds(Announced, rank=_within, local_world_size=_within))
_PINNED: Final = [
    StagedFile(
        path=path,
        pin=f"save/rank-00000/{path}",
        fingerprint=Fingerprint(size_bytes=number, mtime_ns=-number, inode=2**64 - 1),
        private=bool(number),
        announced=not number,
        changed_ns=number,
    )
    for number, path in enumerate(("größe", "model/weights.pt", "x"))
]
st.register_type_strategy(StagedFiles, st.lists(st.sampled_from(_PINNED), unique=True).map(staged_files))
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


def _large() -> tuple[Announced, bytes]:
    info = SaveInfo(save="save", name="node-0", step=7, kind=Kind.SNAPSHOT, world_size=1)
    files = [
        SourceFile(
            path=f"out/sample-{number}",
            fingerprint=Fingerprint(size_bytes=number, mtime_ns=number, inode=number),
            method=PinMethod.LINK,
        )
        for number in range(5_000)
    ]
    content = SnapshotContent(base=None, kept=(), files=files)
    event = Announced(at=1.0, info=info, rank=0, path="/out", files=(), local_world_size=1, snapshot=content)
    return event, encode_event(event)


def test_a_large_record_is_compressed_and_tells_its_save_without_being_read() -> None:
    event, record = _large()
    assert len(record) < 200_000
    assert decode_event(record) == event
    assert is_large(record)
    assert save_of_record(record[:60]) == save_of_record(record) == ("save", "snapshot 7 of node-0")
    assert not is_large(encode_event(Exited(at=1.0)))


@pytest.mark.parametrize("position", [12, 46, 50, 200, 20_000, -2])
def test_a_large_record_with_one_flipped_bit_is_not_believed(position: int) -> None:
    changed = bytearray(_large()[1])
    changed[position] ^= 1
    with pytest.raises(UnknownRecordError):
        decode_event(bytes(changed))


@pytest.mark.parametrize("change", [lambda record: record[:-1], lambda record: record + b"x"])
def test_a_large_record_that_is_cut_off_or_longer_is_not_believed(change: Callable[[bytes], bytes]) -> None:
    with pytest.raises(UnknownRecordError):
        decode_event(change(_large()[1]))


def test_an_announcement_beside_its_pins_is_text_and_a_compressed_one_is_not_read() -> None:
    event, record = _large()
    assert decode_announcement(encode_announcement(event)) == event
    with pytest.raises(UnknownRecordError, match="it does not end with its checksum"):
        decode_announcement(record.decode("latin-1"))
    with pytest.raises(UnknownRecordError, match="no announcement"):
        decode_announcement(encode_event(Exited(at=1.0)).decode())


def test_a_record_that_would_fill_the_memory_is_refused_before_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_codec, "RECORD_BYTES", 2**20)
    line = _large()[1].partition(b"\n")[0]
    bomb = line + b"\n" + zlib.compress(b" " * 2**26)
    tracemalloc.start()
    try:
        with pytest.raises(UnknownRecordError, match="too long"):
            decode_event(bomb)
        assert tracemalloc.get_traced_memory()[1] < 2**23
    finally:
        tracemalloc.stop()


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

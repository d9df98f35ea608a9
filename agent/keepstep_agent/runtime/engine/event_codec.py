"""Encodes durable events as journal records and decodes them: `checked_json` of the event's tag, its body and a format.

Each record carries its own checksum, because the agent trusts its journal: a single flipped digit could commit a
checkpoint that nobody can restore. A large one is compressed, after a line that says which save it is of: that of a
snapshot with 100,000 files has 15 MiB, which SQLite would copy, and the volume keep.
"""

import zlib
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, Final, Literal

import msgspec

from keepstep_agent.core.agent.events import EVENT_TAGS, Announced, DurableEvent
from keepstep_agent.core.errors import ErrorKind, KeepstepError
from keepstep_agent.core.limits import RECORD_BYTES
from keepstep_agent.core.model import SaveInfo
from keepstep_agent.core.stored import checked_json
from keepstep_agent.core.stored.checked_json import UndecodableError

_FORMAT: Final = 1
_CLASSES: Final = {tag: cls for cls, tag in EVENT_TAGS.items()}
_LARGE_BYTES: Final = 256 * 1024
_FASTEST: Final = 1


class UnknownRecordError(KeepstepError):
    """The record was damaged, or this version of the agent cannot read it."""

    def __init__(self, message: str) -> None:
        super().__init__(ErrorKind.VOLUME_UNUSABLE, message, hint="the next start of the agent moves the journal aside")


class _News(msgspec.Struct):
    info: SaveInfo


class _Body(msgspec.Struct):
    """The parts of an event that say which save it is of. The rest, which may be long, is not decoded."""

    work: tuple[Any, ...] = ()
    info: SaveInfo | None = None
    news: _News | None = None
    save: str = ""


class _Head(msgspec.Struct):
    body: _Body


class _Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a large record begins with."""

    save: str
    title: str


class _Record(msgspec.Struct, forbid_unknown_fields=True):
    format: Literal[1]
    event: str
    body: msgspec.Raw
    crc32: str


def encode_event(event: DurableEvent) -> bytes:
    """Return the event's record in the journal."""
    pieces = _pieces(event)
    record = bytearray()
    for piece in pieces:
        record += piece
        if len(record) >= _LARGE_BYTES:
            return _compressed(event, chain((record,), pieces))
    return bytes(record)


def encode_announcement(event: Announced) -> str:
    """Return the record of an announcement that is stored beside its pins, where the trainer can write another one.

    It is never compressed: a few bytes of a forged one could fill the memory.
    """
    return b"".join(_pieces(event)).decode()


def _pieces(event: DurableEvent) -> Iterator[bytes]:
    return checked_json.encoded({"format": _FORMAT, "event": EVENT_TAGS[type(event)], "body": event})


def _compressed(event: DurableEvent, pieces: Iterable[bytes | bytearray]) -> bytes:
    save, title = _save_of_event(event)
    compressor = zlib.compressobj(_FASTEST)
    compressed = [compressor.compress(piece) for piece in pieces]
    return b"".join((msgspec.json.encode(_Line(save, title)), b"\n", *compressed, compressor.flush()))


def is_large(record: bytes) -> bool:
    """Whether a record is compressed, and may take much memory when it is decoded."""
    return record.find(b"\n", 0, -1) != -1


def save_of_record(record: bytes) -> tuple[str, str]:
    """Return the id of the save that a record is of, and its title as far as the record has it; empty if none.

    Takes little memory, however large the record is. What cannot be read has none.
    """
    line, _, compressed = record.partition(b"\n")
    try:
        if compressed:
            of = msgspec.json.decode(line, type=_Line)
            return of.save, of.title
        body = msgspec.json.decode(record, type=_Head).body
    except (ValueError, RecursionError, OverflowError):
        return "", ""
    return _save_of(body)


def _save_of(body: _Body) -> tuple[str, str]:
    if body.info is not None:
        return body.info.save, str(body.info)
    if body.news is not None:
        return body.news.info.save, ""
    return (str(body.work[1]) if len(body.work) > 1 else body.save), ""


def decode_event(record: bytes) -> DurableEvent:
    """Raises UnknownRecordError."""
    line, _, compressed = record.partition(b"\n")
    if not compressed:
        return _decode(record)
    try:
        event = _decode(_decompressed(compressed))
    except (UndecodableError, zlib.error) as error:
        raise UnknownRecordError(f"{line[:80]!r}: {error}") from error
    if save_of_record(record)[0] != _save_of_event(event)[0]:
        raise UnknownRecordError(f"{line[:80]!r}: it does not begin with its save")
    return event


def decode_announcement(text: str) -> Announced:
    """Raises UnknownRecordError."""
    event = _decode(text.encode())
    if not isinstance(event, Announced):
        raise UnknownRecordError(f"{text[:80]!r}: it is no announcement")
    return event


def _decode(record: bytes) -> DurableEvent:
    try:
        raw = checked_json.decode(record, _Record, limit_bytes=RECORD_BYTES)
        event: DurableEvent = msgspec.json.decode(raw.body, type=_CLASSES[raw.event])
    except (UndecodableError, ValueError, KeyError, RecursionError, OverflowError) as error:
        raise UnknownRecordError(f"{record[:80]!r}: {error}") from error
    return event


def _save_of_event(event: DurableEvent) -> tuple[str, str]:
    return _save_of(msgspec.convert(event, _Body, from_attributes=True))


def _decompressed(compressed: bytes) -> bytes:
    """Raises zlib.error, and UndecodableError if it is cut off or longer than any record."""
    decompressor = zlib.decompressobj()
    content = decompressor.decompress(compressed, RECORD_BYTES + 1)
    if not decompressor.eof or decompressor.unused_data:
        raise UndecodableError("it is cut off, or too long")
    return content

"""JSON objects that end in their own checksum: the last member is a checksum of all bytes before it.

Markers, manifests, pins and journal records have this form, so a reader notices a flipped byte without another
object to compare with. Invariants: the same value has the same bytes; input that is cut off, too large or otherwise
impossible to decode raises UndecodableError.
"""

import re
from collections.abc import Iterable, Iterator
from io import BytesIO
from itertools import islice
from typing import Any, Final, Literal, TypeVar, get_args, get_type_hints
from zlib import crc32

import msgspec

_Value = TypeVar("_Value")

_END: Final = b',"crc32":"%08x"}\n'
_END_PATTERN: Final = re.compile(rb',"crc32":"([0-9a-f]{8})"\}\n')
_END_BYTES: Final = len(_END % 0)
_ENCODER: Final = msgspec.json.Encoder(order="sorted", enc_hook=list)
_BATCH: Final = 256
"""How many items of a sequence are objects at a time."""
_LEFT_OUT: Final = b"\0"
"""What stands for a sequence until it is encoded. JSON has no such byte."""


class UndecodableError(Exception):
    """The input is not what was written, or is beyond the limits. The message says why."""


class UnknownFormatError(UndecodableError):
    """The input is intact, but has a format that this version of Keepstep does not know: a newer version wrote it."""


class _Formatted(msgspec.Struct):
    format: int


def encode(value: Any) -> bytes:
    """Encode `value`, which is a mapping, struct or dataclass with at least one member."""
    content = BytesIO()
    for piece in encoded(value):
        content.write(piece)
    return content.getvalue()


def encoded(value: Any) -> Iterator[bytes]:
    """Yield the encoding of such a value in pieces, so that all of a large one is never in memory.

    Columns and other sequences that are no lists are encoded item by item.
    """
    checksum, last = 0, b""
    for piece in pieces(value, order="sorted"):
        checksum = crc32(last, checksum)
        yield last
        last = piece
    assert last.endswith(b"}"), last
    yield last[:-1]
    yield _END % crc32(last[:-1], checksum)


def pieces(value: Any, order: Literal["sorted"] | None = None) -> Iterator[bytes]:
    """Yield the encoding of such a value without a checksum, as `encoded` does. `order`: of its members."""
    sequences: list[Iterable[Any]] = []

    def leave_out(sequence: Iterable[Any]) -> msgspec.Raw:
        sequences.append(sequence)
        return msgspec.Raw(_LEFT_OUT)

    first, *others = msgspec.json.Encoder(order=order, enc_hook=leave_out).encode(value).split(_LEFT_OUT)
    yield first
    for sequence, after in zip(sequences, others, strict=True):
        items = iter(sequence)
        separator = b"["
        while batch := list(islice(items, _BATCH)):
            yield separator + _ENCODER.encode(batch)[1:-1]
            separator = b","
        yield b"[]" + after if separator == b"[" else b"]" + after


def decode(body: bytes, as_type: type[_Value], *, limit_bytes: int) -> _Value:
    """Decode `body`. Raises UndecodableError.

    A type of large objects has a field `crc32`, so that the body is decoded as it is. Others get a copy without it.
    """
    if len(body) > limit_bytes:
        raise UndecodableError(f"it has {len(body):,} bytes, more than {limit_bytes:,}")
    end = _END_PATTERN.fullmatch(body[-_END_BYTES:])
    if end is None:
        raise UndecodableError("it does not end with its checksum")
    if int(end[1], 16) != crc32(memoryview(body)[:-_END_BYTES]):
        raise UndecodableError("its bytes do not have the checksum at its end")
    content = body if "crc32" in getattr(as_type, "__struct_fields__", ()) else body[:-_END_BYTES] + b"}"
    try:
        return msgspec.json.decode(content, type=as_type)
    except (ValueError, RecursionError, OverflowError) as error:
        raise _undecodable(content, as_type, error) from error


def _undecodable(content: bytes, as_type: type, error: Exception) -> UndecodableError:
    known = get_args(get_type_hints(as_type).get("format"))
    try:
        found = msgspec.json.decode(content, type=_Formatted).format
    except (ValueError, RecursionError, OverflowError):
        return UndecodableError(str(error))
    if not known or found <= max(known):
        return UndecodableError(str(error))
    reads = " and ".join(map(str, known))
    return UnknownFormatError(f"it has format {found}, this version of Keepstep reads {reads}: update Keepstep")

"""Small things that Mooring writes: one JSON object, the last member of which is a checksum of all before it.

Markers, rank manifests, pins and journal records have this form. A byte that flips on the way is seen by whoever reads,
without another object to compare with. Invariants: the same value has the same bytes; whatever is wrong with what was
read, be it cut off, too large or a decoder's own trouble with it, is an UndecodableError.
"""

import re
from typing import Any, Final, TypeVar, get_args, get_type_hints
from zlib import crc32

import msgspec

_Value = TypeVar("_Value")

_END: Final = b',"crc32":"%08x"}\n'
_END_PATTERN: Final = re.compile(rb',"crc32":"([0-9a-f]{8})"\}\n')
_END_BYTES: Final = len(_END % 0)


class UndecodableError(Exception):
    """What was read is not what was written, or beyond the limits. The message says why."""


class UnknownFormatError(UndecodableError):
    """It is whole, and of a format that this version of Mooring does not know: a newer one wrote it."""


class _Formatted(msgspec.Struct):
    format: int


def encode(value: Any) -> bytes:
    """`value` is a mapping, struct or dataclass, and not empty."""
    content = msgspec.json.encode(value, order="sorted").removesuffix(b"}")
    return content + _END % crc32(content)


def decode(body: bytes, as_type: type[_Value], *, limit_bytes: int) -> _Value:
    """Raises UndecodableError."""
    if len(body) > limit_bytes:
        raise UndecodableError(f"it has {len(body):,} bytes, more than {limit_bytes:,}")
    end = _END_PATTERN.fullmatch(body[-_END_BYTES:])
    if end is None:
        raise UndecodableError("it does not end with its checksum")
    # One copy, for it may be large.
    content = bytearray(memoryview(body)[:-_END_BYTES])
    if int(end[1], 16) != crc32(content):
        raise UndecodableError("its bytes do not have the checksum at its end")
    content += b"}"
    try:
        return msgspec.json.decode(content, type=as_type)
    except (ValueError, RecursionError, OverflowError) as error:
        raise _undecodable(content, as_type, error) from error


def _undecodable(content: bytearray, as_type: type, error: Exception) -> UndecodableError:
    known = get_args(get_type_hints(as_type).get("format"))
    try:
        found = msgspec.json.decode(content, type=_Formatted).format
    except (ValueError, RecursionError, OverflowError):
        return UndecodableError(str(error))
    if not known or found in known:
        return UndecodableError(str(error))
    reads = " and ".join(map(str, known))
    return UnknownFormatError(f"it has format {found}, this version of Mooring reads {reads}: update Mooring")

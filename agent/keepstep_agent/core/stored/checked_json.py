"""JSON objects that end in their own checksum: the last member is a checksum of all bytes before it.

Markers, manifests, pins and journal records have this form, so a reader notices a flipped byte without another
object to compare with. Invariants: the same value has the same bytes; input that is cut off, too large or otherwise
impossible to decode raises UndecodableError.
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
    """The input is not what was written, or is beyond the limits. The message says why."""


class UnknownFormatError(UndecodableError):
    """The input is intact, but has a format that this version of Keepstep does not know: a newer version wrote it."""


class _Formatted(msgspec.Struct):
    format: int


def encode(value: Any) -> bytes:
    """Encode `value`, which is a mapping, struct or dataclass with at least one member."""
    content = encode_plain(value).removesuffix(b"}")
    return content + _END % crc32(content)


def encode_plain(value: Any) -> bytes:
    """Encode `value` as JSON with sorted members, and arrays as lists."""
    return msgspec.json.encode(value, order="sorted", enc_hook=list)


def decode(body: bytes, as_type: type[_Value], *, limit_bytes: int) -> _Value:
    """Decode `body`. Raises UndecodableError."""
    if len(body) > limit_bytes:
        raise UndecodableError(f"it has {len(body):,} bytes, more than {limit_bytes:,}")
    end = _END_PATTERN.fullmatch(body[-_END_BYTES:])
    if end is None:
        raise UndecodableError("it does not end with its checksum")
    # Only one copy, because it may be large.
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
    if not known or found <= max(known):
        return UndecodableError(str(error))
    reads = " and ".join(map(str, known))
    return UnknownFormatError(f"it has format {found}, this version of Keepstep reads {reads}: update Keepstep")

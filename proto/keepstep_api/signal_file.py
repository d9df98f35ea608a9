"""The signal file: 64 bytes through which the agent asks trainers to save, without an open channel.

Layout, little endian: magic `MRNG`, version u32, number u64, deadline f64 (unix seconds, 0 = go on after saving),
terminating u8, padding. The number is written last, so a reader that sees a new number also sees the rest of that
request. A torn read is possible between two requests and harmless: the later request is read again.
"""

import struct
from dataclasses import dataclass
from typing import Final

_FORMAT: Final = struct.Struct("<4sIQdB")
_MAGIC: Final = b"MRNG"
_VERSION: Final = 1
SIZE_BYTES: Final = 64
NUMBER_OFFSET: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveSignal:
    """One save request. `number` counts up from 0 (none yet); `deadline_unix` is 0 unless `terminating`."""

    number: int = 0
    deadline_unix: float = 0.0
    terminating: bool = False


def encode(signal: SaveSignal) -> bytes:
    """Return the file's whole content."""
    body = _FORMAT.pack(_MAGIC, _VERSION, signal.number, signal.deadline_unix, signal.terminating)
    return body.ljust(SIZE_BYTES, b"\0")


def decode(content: bytes) -> SaveSignal:
    """Return the request in the file. Anything that is not a signal file reads as no request."""
    if len(content) < _FORMAT.size:
        return SaveSignal()
    magic, version, number, deadline_unix, terminating = _FORMAT.unpack_from(content)
    if magic != _MAGIC or version != _VERSION:
        return SaveSignal()
    return SaveSignal(number=number, deadline_unix=deadline_unix, terminating=bool(terminating))

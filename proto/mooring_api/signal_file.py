"""The doorbell: a 64-byte file by which the agent asks trainers to save, without a channel held open.

Layout, little endian: magic `MRNG`, version u32, ring u64, deadline f64 (unix seconds, 0 = go on after saving),
terminating u8, padding. The ring is written last, so that a reader who sees a new ring sees the rest of it; a torn
read is possible between two rings and harmless: the later ring is read again.
"""

import struct
from dataclasses import dataclass
from typing import Final

_FORMAT: Final = struct.Struct("<4sIQdB")
_MAGIC: Final = b"MRNG"
_VERSION: Final = 1
SIZE_BYTES: Final = 64
RING_OFFSET: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveSignal:
    """One ringing. `ring` counts up from 0 (never rung); `deadline_unix` is 0 unless `terminating`."""

    ring: int = 0
    deadline_unix: float = 0.0
    terminating: bool = False


def encode(ring: SaveSignal) -> bytes:
    """The file's whole content."""
    body = _FORMAT.pack(_MAGIC, _VERSION, ring.ring, ring.deadline_unix, ring.terminating)
    return body.ljust(SIZE_BYTES, b"\0")


def decode(content: bytes) -> SaveSignal:
    """What a reader sees; anything that is no doorbell reads as never rung."""
    if len(content) < _FORMAT.size:
        return SaveSignal()
    magic, version, ring, deadline_unix, terminating = _FORMAT.unpack_from(content)
    if magic != _MAGIC or version != _VERSION:
        return SaveSignal()
    return SaveSignal(ring=ring, deadline_unix=deadline_unix, terminating=bool(terminating))

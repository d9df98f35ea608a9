"""Encodes durable events as journal records and decodes them: `checked_json` of the event's tag, its body and a format.

Each record carries its own checksum, because the agent trusts its journal: a single flipped digit could commit a
checkpoint that nobody can restore.
"""

from typing import Final, Literal

import msgspec

from keepstep_agent.core.agent.events import EVENT_TAGS, DurableEvent
from keepstep_agent.core.errors import ErrorKind, KeepstepError
from keepstep_agent.core.limits import RECORD_BYTES
from keepstep_agent.core.stored import checked_json
from keepstep_agent.core.stored.checked_json import UndecodableError

_FORMAT: Final = 1
_CLASSES: Final = {tag: cls for cls, tag in EVENT_TAGS.items()}


class UnknownRecordError(KeepstepError):
    """The record was damaged, or this version of the agent cannot read it."""

    def __init__(self, message: str) -> None:
        super().__init__(ErrorKind.VOLUME_UNUSABLE, message, hint="the next start of the agent sets the journal aside")


class _Record(msgspec.Struct, forbid_unknown_fields=True):
    format: Literal[1]
    event: str
    body: msgspec.Raw


def encode_event(event: DurableEvent) -> bytes:
    body = msgspec.Raw(checked_json.encode_plain(event))
    return checked_json.encode(_Record(format=_FORMAT, event=EVENT_TAGS[type(event)], body=body))


def decode_event(record: bytes) -> DurableEvent:
    """Raises UnknownRecordError."""
    try:
        raw = checked_json.decode(record, _Record, limit_bytes=RECORD_BYTES)
        event: DurableEvent = msgspec.json.decode(raw.body, type=_CLASSES[raw.event])
    except (UndecodableError, ValueError, KeyError, RecursionError, OverflowError) as error:
        raise UnknownRecordError(f"{record[:80]!r}: {error}") from error
    return event

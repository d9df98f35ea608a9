"""Durable events as journal records, both ways. A record is JSON: {"event": <class name>, "body": {…}}."""

from typing import Any, Final

import msgspec

from mooring_agent.core.events import DURABLE, DurableEvent

_CLASSES: Final = {cls.__name__: cls for cls in DURABLE}


class UnknownRecordError(Exception):
    """A record that this version of the agent cannot read."""


class _Record(msgspec.Struct):
    event: str
    body: Any


def encode_event(event: DurableEvent) -> bytes:
    return msgspec.json.encode(_Record(event=type(event).__name__, body=event))


def decode_event(record: bytes) -> DurableEvent:
    """Raises UnknownRecordError."""
    try:
        raw = msgspec.json.decode(record, type=_Record)
        event: DurableEvent = msgspec.convert(raw.body, type=_CLASSES[raw.event])
    except (msgspec.MsgspecError, KeyError) as error:
        raise UnknownRecordError(f"{record[:80]!r}: {error}") from error
    return event

"""The pin: which checkpoint one attempt resumes from, as all its pods must see it, and its JSON.

Owns the value and its encoding. Knows nothing of who may write it. One value has exactly one encoding, so that a pod
that reads back its own pin recognises it.
"""

from dataclasses import dataclass
from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

from mooring_agent.core import checked_json
from mooring_agent.core.checked_json import UndecodableError
from mooring_agent.core.errors import ErrorKind, RequestError, StoreError
from mooring_agent.core.limits import PATH_BYTES, PIN_BYTES, Step
from mooring_agent.core.object_layout import check_token, parse_marker_key

_FORMAT_VERSION: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """`marker` is the commit marker's key; empty (with step 0 and no save): the attempt starts from nothing."""

    attempt: str
    step: int = 0
    save: str = ""
    marker: str = ""

    @property
    def fresh_start(self) -> bool:
        return not self.marker


class _PinObject(Struct, forbid_unknown_fields=True, kw_only=True):
    format: Literal[1]
    attempt: str
    step: Step
    save: str
    marker: Annotated[str, Meta(max_length=PATH_BYTES)] | None


def encode_pin(pin: Pin) -> bytes:
    return checked_json.encode(
        _PinObject(format=_FORMAT_VERSION, attempt=pin.attempt, step=pin.step, save=pin.save, marker=pin.marker or None)
    )


def decode_pin(body: bytes, key: str) -> Pin:
    """Raises StoreError(CHECKPOINT_CORRUPT) that names `key`."""
    try:
        value = checked_json.decode(body, _PinObject, limit_bytes=PIN_BYTES)
        pin = Pin(
            attempt=check_token(value.attempt, "attempt"), step=value.step, save=value.save, marker=value.marker or ""
        )
        named = (0, "") if pin.fresh_start else parse_marker_key(pin.marker)
        if named != (pin.step, pin.save):
            raise UndecodableError(f"the marker {pin.marker!r} is not of step {pin.step} and save {pin.save!r}")
        return pin
    except (UndecodableError, RequestError) as error:
        raise StoreError(
            ErrorKind.CHECKPOINT_CORRUPT,
            f"the resume pin {key} cannot be read: {error}",
            hint="remove that object, or start the run with a new attempt",
        ) from error

"""The pin: which checkpoint one attempt resumes from, as all its pods must see it, and its JSON.

Owns the value and its encoding. Knows nothing of who may write it. One value has exactly one encoding, so that a pod
that reads back its own pin recognises it.
"""

import json
from dataclasses import dataclass
from typing import Final

from mooring_agent.core.errors import ErrorKind, StoreError

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


def encode_pin(pin: Pin) -> bytes:
    value = {
        "format": _FORMAT_VERSION,
        "attempt": pin.attempt,
        "step": pin.step,
        "save": pin.save,
        "marker": pin.marker or None,
    }
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode() + b"\n"


def decode_pin(body: bytes, key: str) -> Pin:
    """Raises StoreError(CHECKPOINT_CORRUPT) that names `key`."""
    try:
        value = json.loads(body)
        if value["format"] != _FORMAT_VERSION:
            raise ValueError(f"format {value['format']!r} is not known here")
        return Pin(
            attempt=str(value["attempt"]),
            step=int(value["step"]),
            save=str(value["save"]),
            marker=str(value["marker"] or ""),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise StoreError(
            ErrorKind.CHECKPOINT_CORRUPT,
            f"the resume pin {key} cannot be read: {error}",
            hint="remove that object, or start the run with a new attempt",
        ) from error

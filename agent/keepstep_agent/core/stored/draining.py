"""The notice of a pod that ends and may still commit: the object that starts of the run wait for. docs/design/0026."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from keepstep_agent.core.limits import DRAINING_BYTES, SECONDS
from keepstep_agent.core.stored import checked_json
from keepstep_agent.core.stored.checked_json import UndecodableError
from keepstep_agent.core.stored.manifest import corrupt


class Draining(Struct, frozen=True, kw_only=True):
    """Who ends, for people, and how long it had left when this was written. Its agent renews it while it lives."""

    holder: Annotated[str, Meta(max_length=512)]
    seconds_left: Annotated[float, Meta(ge=0, le=SECONDS)]
    format: Literal[1] = 1


def encode_draining(draining: Draining) -> bytes:
    return checked_json.encode(draining)


def decode_draining(body: bytes, key: str) -> Draining:
    """Decode a notice. Raises StoreError(CHECKPOINT_CORRUPT or FORMAT_UNKNOWN) that names `key`."""
    try:
        return checked_json.decode(body, Draining, limit_bytes=DRAINING_BYTES)
    except UndecodableError as error:
        raise corrupt(key, error) from error

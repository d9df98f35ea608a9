"""The lease of a destination: the object that says which `keepstep run` is alive there. docs/design/0025."""

from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

from keepstep_agent.core.limits import NameText
from keepstep_agent.core.stored import checked_json
from keepstep_agent.core.stored.checked_json import UndecodableError
from keepstep_agent.core.stored.manifest import corrupt

LEASE_BYTES: Final = 4096


class Lease(Struct, frozen=True, kw_only=True):
    """Who holds the destination. `volume` is the id of its volume, `holder` is for people; `attempt` may be empty."""

    volume: NameText
    attempt: NameText
    holder: Annotated[str, Meta(max_length=512)]
    format: Literal[1] = 1

    def is_of_same_run(self, other: "Lease") -> bool:
        """Whether both are of one run: an earlier life on this volume, or another node of this attempt."""
        return self.volume == other.volume or (self.attempt != "" and self.attempt == other.attempt)


def encode_lease(lease: Lease) -> bytes:
    return checked_json.encode(lease)


def decode_lease(body: bytes, key: str) -> Lease:
    """Decode a lease. Raises StoreError(CHECKPOINT_CORRUPT or FORMAT_UNKNOWN) that names `key`."""
    try:
        return checked_json.decode(body, Lease, limit_bytes=LEASE_BYTES)
    except UndecodableError as error:
        raise corrupt(key, error) from error

"""A snapshot's reservation: the object that names the snapshot whose objects it shares, so that no prune deletes them.

docs/design/0014 has the protocol, and tests/model/sharing_model.py searches its interleavings.
"""

from typing import Final, Literal

from msgspec import Struct

from keepstep_agent.core.errors import RequestError, checkpoint_corrupt
from keepstep_agent.core.limits import Step
from keepstep_agent.core.model import SnapshotId
from keepstep_agent.core.stored import checked_json
from keepstep_agent.core.stored.checked_json import UndecodableError
from keepstep_agent.core.stored.object_layout import check_token

RESERVATION_BYTES: Final = 4096


class _Reservation(Struct, forbid_unknown_fields=True, kw_only=True):
    format: Literal[1]
    series: str
    number: Step
    save: str


def encode_reservation(base: SnapshotId) -> bytes:
    return checked_json.encode(_Reservation(format=1, series=base.series, number=base.number, save=base.save))


def decode_reservation(body: bytes, key: str) -> SnapshotId:
    """Return the reserved snapshot. Raises StoreError(CHECKPOINT_CORRUPT) that names `key`."""
    try:
        value = checked_json.decode(body, _Reservation, limit_bytes=RESERVATION_BYTES)
        return SnapshotId(
            series=check_token(value.series, "series"), number=value.number, save=check_token(value.save, "save id")
        )
    except (UndecodableError, RequestError) as error:
        raise checkpoint_corrupt(f"{key} is no reservation: {error}") from error

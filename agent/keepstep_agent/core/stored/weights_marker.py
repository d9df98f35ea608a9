"""Encodes and decodes the marker of a save of which only the weights are left. docs/design/0020.

It holds what the commit marker said, and what was dropped. Decoding refuses what `stored.manifest` refuses.
"""

from dataclasses import replace
from typing import Annotated, Final, Literal

from msgspec import Meta

from keepstep_agent.core.errors import RequestError
from keepstep_agent.core.limits import MARKER_BYTES, OPTIMIZER_PATTERN_CHARACTERS, OPTIMIZER_PATTERNS, Count, Moment
from keepstep_agent.core.model import CommitMarker, WeightsOnly
from keepstep_agent.core.stored import checked_json
from keepstep_agent.core.stored.checked_json import UndecodableError
from keepstep_agent.core.stored.manifest import MarkerObject, StoredObject, corrupt, marker_object, marker_of

_FORMAT_VERSION: Final = 1

_Pattern = Annotated[str, Meta(min_length=1, max_length=OPTIMIZER_PATTERN_CHARACTERS)]


class _WeightsMarker(StoredObject):
    format: Literal[1]
    committed_at: Moment
    optimizer_files: Annotated[tuple[_Pattern, ...], Meta(min_length=1, max_length=OPTIMIZER_PATTERNS)]
    dropped_files: Count
    dropped_bytes: Count
    marker: MarkerObject


def encode_weights_marker(marker: CommitMarker) -> bytes:
    """Encode a marker that has `weights_only`."""
    left = marker.weights_only
    assert left is not None, "nothing was dropped"
    return checked_json.encode(
        _WeightsMarker(
            format=_FORMAT_VERSION,
            committed_at=float(left.committed_at),
            optimizer_files=left.optimizer_files,
            dropped_files=left.dropped_files,
            dropped_bytes=left.dropped_bytes,
            marker=marker_object(marker),
        )
    )


def decode_weights_marker(body: bytes, key: str) -> CommitMarker:
    """Decode such a marker. Raises StoreError(CHECKPOINT_CORRUPT or FORMAT_UNKNOWN) that names `key`."""
    try:
        value = checked_json.decode(body, _WeightsMarker, limit_bytes=MARKER_BYTES)
        marker = marker_of(value.marker)
        if value.dropped_bytes > marker.size_bytes or value.dropped_files >= marker.file_count:
            raise UndecodableError("more was dropped than there was")
        if marker.info.is_snapshot:
            raise UndecodableError("a snapshot keeps all its files")
    except (UndecodableError, RequestError) as error:
        raise corrupt(key, error) from error
    left = WeightsOnly(
        committed_at=value.committed_at,
        optimizer_files=value.optimizer_files,
        dropped_files=value.dropped_files,
        dropped_bytes=value.dropped_bytes,
    )
    return replace(marker, weights_only=left)

"""Drops the optimizer's files of old checkpoints, and reads the markers of those that have lost them. docs/design/0020.

Invariants: the weights marker is read back before the commit marker is deleted, and that goes before the files; what is
deleted is what the weights marker names.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import structlog

from mooring_agent.catalog.markers import read_marker
from mooring_agent.catalog.object_reads import DAMAGE, for_each
from mooring_agent.core.errors import ErrorKind, StoreError, checkpoint_corrupt
from mooring_agent.core.model import WeightsOnly, is_optimizer_file
from mooring_agent.core.policies.restore_choice import CommittedSave
from mooring_agent.core.policies.retention.weights_only import Reduction
from mooring_agent.core.stored.object_layout import WEIGHTS_PREFIX, weights_key
from mooring_agent.core.stored.weights_marker import decode_weights_marker, encode_weights_marker
from mooring_agent.ports import StoreReader, StoreWriter

_REQUESTS_AT_ONCE: Final = 8

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsOnlySaves:
    """Saves of which only the weights are left, as policies judge them: `modified_at` is when they were committed.

    `patterns` are those in their markers, by save. The saves in `unreadable` have a marker that cannot be read: nobody
    can say when they were committed, so they are not judged and stay.
    """

    saves: tuple[CommittedSave, ...]
    patterns: dict[str, Sequence[str]]
    unreadable: frozenset[str]


async def read_weights_only(store: StoreReader, listed: Iterable[CommittedSave]) -> WeightsOnlySaves:
    """Read the markers of these saves."""
    saves: list[CommittedSave] = []
    patterns: dict[str, Sequence[str]] = {}
    unreadable: set[str] = set()

    async def read(one: CommittedSave) -> None:
        try:
            left = (await read_marker(store, one)).weights_only
        except StoreError as error:
            if error.kind not in (*DAMAGE, ErrorKind.FORMAT_UNKNOWN):
                raise
            _log.warning("weights_only.marker_unreadable", save=one.save, error=str(error))
            unreadable.add(one.save)
            return
        assert left is not None, "the marker is of that kind"
        saves.append(replace(one, modified_at=left.committed_at))
        patterns[one.save] = left.optimizer_files

    await for_each(listed, read, at_once=_REQUESTS_AT_ONCE)
    return WeightsOnlySaves(saves=tuple(saves), patterns=patterns, unreadable=frozenset(unreadable))


async def reduce_saves(store: StoreWriter, reductions: Iterable[Reduction], patterns: Sequence[str]) -> None:
    """Drop the optimizer's files of these saves. One whose marker cannot be read stays as it is."""
    for one in reductions:
        if one.committed.weights_only:
            await for_each(one.keys, store.delete, at_once=_REQUESTS_AT_ONCE)
            continue
        try:
            named = await _write_marker(store, one, patterns)
        except StoreError as error:
            if error.kind not in (*DAMAGE, ErrorKind.FORMAT_UNKNOWN):
                raise
            _log.warning("weights_only.left_whole", save=one.committed.save, error=str(error))
            continue
        await store.delete(one.committed.key)
        prefix = f"{one.name}/{one.committed.save}/"
        keys = [key for key in one.keys if is_optimizer_file(key.removeprefix(prefix), named)]
        await for_each(keys, store.delete, at_once=_REQUESTS_AT_ONCE)


async def _write_marker(store: StoreWriter, reduction: Reduction, patterns: Sequence[str]) -> Sequence[str]:
    """Write the weights marker, unless there is one, and return the patterns of the one that is there."""
    committed = reduction.committed
    marker = await read_marker(store, committed)
    left = WeightsOnly(
        committed_at=committed.modified_at,
        optimizer_files=tuple(patterns),
        dropped_files=len(reduction.keys),
        dropped_bytes=reduction.size_bytes,
    )
    key = weights_key(marker.info)
    body = encode_weights_marker(replace(marker, weights_only=left))
    decode_weights_marker(body, key)  # never write what nobody could read
    try:
        await store.put(key, body, if_absent=True)
    except StoreError as error:
        # Whatever the error is, the marker may be there: what is read below decides.
        _log.info("weights_only.marker_not_written", key=key, error=str(error))
    written = await read_marker(store, replace(committed, key=key, weights_only=True))
    if written.info != marker.info or written.manifests != marker.manifests:
        raise checkpoint_corrupt(f"{key} is not the marker of the save that {committed.key} is of")
    assert written.weights_only is not None, "the marker is of that kind"
    return written.weights_only.optimizer_files


async def refuse_fresh_start(store: StoreReader) -> None:
    """Raise StoreError(CHECKPOINT_CORRUPT) if there are saves of which only the weights are left.

    To be asked when nothing is committed: such a run has lost its checkpoints, and must not begin again unnoticed.
    """
    async for _ in store.list(WEIGHTS_PREFIX):
        raise StoreError(
            ErrorKind.CHECKPOINT_CORRUPT,
            "the destination has no whole checkpoint any more, only some without their optimizer's files",
            hint="`mooring download --weights-only` fetches one; to start from step 0, use another destination",
        )

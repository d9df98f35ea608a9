"""Drops the optimizer's files of old checkpoints, and reads the markers of those that have lost them. docs/design/0020.

Invariants: the weights marker is read back before the commit marker is deleted, and that goes before the files; what is
deleted is what the weights marker names.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import structlog

from keepstep_agent.catalog.damage import damaged_saves
from keepstep_agent.catalog.listing import Listing
from keepstep_agent.catalog.markers import read_marker
from keepstep_agent.catalog.object_reads import UNREADABLE, delete_unlocked, for_each, if_there
from keepstep_agent.core.errors import ErrorKind, StoreError, checkpoint_corrupt
from keepstep_agent.core.model import WeightsOnly, is_optimizer_file
from keepstep_agent.core.policies.restore_choice import CommittedSave
from keepstep_agent.core.policies.retention.deletions import Kept
from keepstep_agent.core.policies.retention.weights_only import Reduction
from keepstep_agent.core.settings.values import RetentionSettings
from keepstep_agent.core.stored.object_layout import RESUME_PREFIX, WEIGHTS_PREFIX, file_path, weights_key
from keepstep_agent.core.stored.weights_marker import decode_weights_marker, encode_weights_marker
from keepstep_agent.ports import StoreReader, StoreWriter

_REQUESTS_AT_ONCE: Final = 8

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsOnlySaves:
    """Saves of which only the weights are left, as policies judge them: `modified_at` is when they were committed.

    `patterns` are those in weights markers, by save. `second_markers` are the keys of the weights markers of saves that
    are committed too. The saves in `unreadable` have a weights marker alone, and it cannot be read: nobody can say when
    they were committed, so they are not judged and stay.
    """

    saves: tuple[CommittedSave, ...]
    patterns: dict[str, Sequence[str]]
    second_markers: dict[str, str]
    unreadable: frozenset[str]

    def kept(self) -> Iterator[Kept]:
        """Yield why the saves stay that are not judged."""
        for save in sorted(self.unreadable):
            yield Kept(name="", save=save, reason="the marker of its weights cannot be read")


async def read_weights_only(store: StoreReader, listing: Listing) -> WeightsOnlySaves:
    """Read the weights markers in a listing."""
    committed = {one.save for one in listing.committed}
    saves: list[CommittedSave] = []
    patterns: dict[str, Sequence[str]] = {}
    unreadable: set[str] = set()

    async def read(one: CommittedSave) -> None:
        try:
            marker = await read_marker(store, one)
        except StoreError as error:
            if error.kind not in UNREADABLE:
                raise
            _log.warning("weights_only.marker_unreadable", save=one.save, error=str(error))
            if one.save not in committed:
                unreadable.add(one.save)
            return
        left = marker.weights_only
        assert left is not None, "the marker is of that kind"
        patterns[one.save] = left.optimizer_files
        if one.save not in committed:
            saves.append(replace(one, saved_at=marker.saved_at, modified_at=left.committed_at))

    await for_each(listing.weights_only, read, at_once=_REQUESTS_AT_ONCE)
    return WeightsOnlySaves(
        saves=tuple(saves),
        patterns=patterns,
        second_markers={one.save: one.key for one in listing.weights_only if one.save in committed},
        unreadable=frozenset(unreadable),
    )


async def reduce_saves(
    store: StoreWriter, reductions: Iterable[Reduction], settings: RetentionSettings, listing: Listing
) -> tuple[Reduction, ...]:
    """Drop the optimizer's files of these saves, and return those that have lost them.

    One whose marker cannot be read, or that the store's own retention protects, stays as it is. If a start has pinned
    or doubted anything since `listing`, the rest waits for the next prune.
    """
    done = []
    for one in reductions:
        if one.committed.weights_only:
            if not await delete_unlocked(store, one.keys, at_once=_REQUESTS_AT_ONCE):
                done.append(one)
            continue
        if not await _is_as_listed(store, listing):
            _log.info("weights_only.waits", reason="a run has started, or found a checkpoint damaged")
            break
        try:
            named = await _write_marker(store, one, settings.optimizer_patterns)
        except StoreError as error:
            if error.kind not in UNREADABLE:
                raise
            _log.warning("weights_only.left_whole", save=one.committed.save, error=str(error))
            continue
        keys = [key for key in one.keys if (path := file_path(key)) and is_optimizer_file(path, named)]
        for wave in ([one.committed.key], keys):
            if await delete_unlocked(store, wave, at_once=_REQUESTS_AT_ONCE):
                break
        else:
            done.append(one)
    return tuple(done)


async def _is_as_listed(store: StoreReader, listing: Listing) -> bool:
    """Whether the pins and the notes of damage are those of a listing, which may be hours old."""
    pins = {one.key async for one in store.list(RESUME_PREFIX)}
    return pins <= {one.key for one in listing.pins} and await damaged_saves(store) <= listing.damaged


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
    refused: StoreError | None = None
    # Not every store refuses to replace an object.
    if await if_there(store.head(key)) is None:
        body = encode_weights_marker(replace(marker, weights_only=left))
        decode_weights_marker(body, key)  # never write what nobody could read
        try:
            await store.put(key, body, if_absent=True)
        except StoreError as error:
            # Whatever the error is, the marker may be there.
            refused = error
        if refused and await if_there(store.head(key)) is None:
            raise refused
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
            hint="`keepstep download --weights-only` fetches one; to start from step 0, use another destination",
        )

"""Looks before the first byte of a save whether its id is committed already; then nothing of it is touched.

The core cannot tell: it remembers only the saves that ended last, and nothing from an earlier volume, while the marker
stays. The look costs one request per save and life of the agent. The marker may also be our own, written just before
the agent died: then a manifest that it names holds the times at which our ranks announced.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

import structlog

from keepstep_agent.adapters.checksum import crc64nvme
from keepstep_agent.adapters.control_group import memory_limit_bytes
from keepstep_agent.catalog.markers import committed_save
from keepstep_agent.catalog.object_reads import if_there, read_object
from keepstep_agent.core.agent.state import State
from keepstep_agent.core.errors import ErrorKind, KeepstepError, StoreError
from keepstep_agent.core.limits import MANIFEST_BYTES, MARKER_BYTES
from keepstep_agent.core.model import (
    AnnouncementTime,
    CommitMarker,
    ManifestReference,
    RankManifest,
    SaveInfo,
    SnapshotId,
)
from keepstep_agent.core.stored.manifest import decode_manifest, decode_marker, largest_manifest_bytes
from keepstep_agent.core.stored.object_layout import (
    base_key,
    manifest_key,
    manifests_prefix,
    marker_key,
    parse_manifest_key,
    snapshot_key,
    step_prefix,
    tombstones_prefix,
)
from keepstep_agent.core.stored.reservation import encode_reservation
from keepstep_agent.ports import StoreReader, StoreWriter

log = structlog.get_logger("keepstep.duplicate_save_guard")


async def is_committed(store: StoreReader, info: SaveInfo, announced_at: Mapping[int, AnnouncementTime]) -> bool:
    """Whether the save has a whole marker. `announced_at`: when our ranks announced the save, by rank.

    A marker that cannot be decoded commits nothing: a commit completes one that was cut short, and refuses any other.
    Raises StoreError(CONTRADICTION) when the save belongs to other announcements: then its keys are not ours.
    """
    if not info.is_snapshot:
        # Another output directory may have a save of this id, and its objects would be these.
        listed = [committed_save(one) async for one in store.list(f"{step_prefix(info.step)}{info.save}")]
        keys = {one.key for one in listed if one and one.save == info.save}
        if keys - {marker_key(info)}:
            raise _committed_by_another(info)
        if not keys:
            return False
    marker = None
    try:
        marker = await if_there(read_object(store, marker_key(info), decode_marker, limit_bytes=MARKER_BYTES))
        if marker is None:
            return False
    except StoreError as error:
        if error.kind is not ErrorKind.CHECKPOINT_CORRUPT:
            raise
        log.warning("marker.damaged", save=info.save, error=str(error))
    if marker is not None and marker.info != info:
        raise _committed_by_another(info)
    times = await _announcement_times(store, info, marker, announced_at)
    # A damaged marker does not say which ranks there are.
    if (marker is not None and times.keys() != announced_at.keys()) or not all(
        announced_at[rank].may_be(saved_at) for rank, saved_at in times.items()
    ):
        raise _committed_by_another(info)
    return marker is not None


async def _announcement_times(
    store: StoreReader, info: SaveInfo, marker: CommitMarker | None, ranks: Iterable[int]
) -> dict[int, float]:
    """Return when these ranks announced the save, as far as the marker's manifests say it.

    Without a marker: as far as any manifest of the save says it.
    """
    missing, found = set(ranks), dict[int, float]()
    named: dict[tuple[int, int], ManifestReference | None]
    if marker is not None:
        named = {(one.first_rank, one.rank_count): one for one in marker.manifests}
    else:
        keys = [one.key async for one in store.list(manifests_prefix(info))]
        named = dict.fromkeys(name for key in keys if (name := parse_manifest_key(info, key)))
    limit_bytes = largest_manifest_bytes(memory_limit_bytes(), MANIFEST_BYTES)
    # The likeliest first: an agent's ranks mostly follow one another.
    for first_rank, rank_count in sorted(named, reverse=True):
        if not missing or first_rank > max(missing):
            continue
        key = manifest_key(info, first_rank, rank_count)
        reference = named[first_rank, rank_count]
        read = await if_there(read_object(store, key, partial(_decode_named, reference), limit_bytes=limit_bytes))
        for one in read or ():
            if one.info != info:
                raise _committed_by_another(info)
            if one.rank in missing:
                missing.remove(one.rank)
                found[one.rank] = one.saved_at
    return found


def _decode_named(reference: ManifestReference | None, body: bytes, key: str) -> tuple[RankManifest, ...]:
    """Return the ranks of a manifest; none of another manifest than the marker names."""
    ranks = decode_manifest(body, key)
    return ranks if reference is None or reference.checksum == crc64nvme(body) else ()


def _committed_by_another(info: SaveInfo) -> StoreError:
    return StoreError(
        ErrorKind.CONTRADICTION,
        f"save {info.save} is committed already, by an earlier announcement",
        hint="use a new save id for every save of every attempt",
    )


async def reserve_base(store: StoreWriter, info: SaveInfo, base: SnapshotId) -> None:
    """Reserve the snapshot that this one shares objects with, then make sure that it is there and stays.

    Raises StoreError(BASE_PRUNED) if it is being pruned. The order matters: docs/design/0014.
    """
    await store.put(base_key(info), encode_reservation(base))
    tombstones = [one.key async for one in store.list(tombstones_prefix(base.save))]
    if tombstones or await if_there(store.head(snapshot_key(base))) is None:
        raise StoreError(
            ErrorKind.BASE_PRUNED,
            f"snapshot {base.number} of {base.series} (save {base.save}), was pruned, and this one shares objects",
            hint="nothing to do: the next snapshot sends everything",
        )


@dataclass(slots=True)
class _Look:
    """The look for one save's marker. Transfers that wait for it fail with it, so that a dead store is asked once."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    clear: bool = False
    failures: int = 0
    error: KeepstepError | None = None


class DuplicateSaveGuard:
    """Looks before the first byte of a save whether its id is committed already. `state` returns the current state."""

    def __init__(self, state: Callable[[], State]) -> None:
        self._state = state
        self._looks: dict[str, _Look] = {}

    async def require_new(self, store: StoreWriter, save: str) -> None:
        """Raise StoreError(CONTRADICTION) if the id is committed already and that is not the save that we have here.

        Also reserves the base of a snapshot, in every life of the agent, and raises BASE_PRUNED.
        """
        checkpoint = self._state().checkpoints.get(save)
        if checkpoint is None:
            return
        look = self._looks.setdefault(save, _Look())
        failures = look.failures
        async with look.lock:
            if look.clear:
                return
            if look.error is not None and look.failures > failures:
                raise look.error
            try:
                # Exact times: Reconcile has looked for what an earlier agent may have committed by the same record.
                announced_at = {
                    rank: AnnouncementTime(at=contribution.announced.at)
                    for rank, contribution in checkpoint.contributions.items()
                }
                committed = await is_committed(store, checkpoint.info, announced_at)
                for contribution in () if committed else checkpoint.contributions.values():
                    snapshot = contribution.announced.snapshot
                    if snapshot is not None and snapshot.base is not None:
                        await reserve_base(store, checkpoint.info, snapshot.base)
            except KeepstepError as error:
                look.error, look.failures = error, look.failures + 1
                raise
            look.clear = True

    def forget(self, save: str) -> None:
        """Forget the look for a save that is over."""
        self._looks.pop(save, None)

"""Writes rank manifests and commit markers, and resolves every doubt by reading back. Verdicts: core.stored.commit.

Before the first byte of a save is sent, `DuplicateSaveGuard` looks for a commit marker of its id. If the id is
committed already, nothing of it is touched. The core cannot tell: it remembers only the saves that ended last, and
nothing from an earlier volume, while the marker stays. The look costs one request per save and life of the agent.
The marker may also be our own, written just before the agent died: then our rank manifests hold the times at which
these ranks announced.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import structlog

from mooring_agent.adapters.checksum import crc64nvme
from mooring_agent.adapters.control_group import memory_limit_bytes
from mooring_agent.catalog.object_reads import at_once, for_each, get_whole, if_there, read_object
from mooring_agent.core.agent.commands import Commit, WriteManifest
from mooring_agent.core.agent.events import Committed, CommitWaits, ManifestStored, ObjectsLost
from mooring_agent.core.agent.state import State
from mooring_agent.core.errors import ErrorKind, MooringError, RequestError, StoreError
from mooring_agent.core.limits import MANIFEST_BYTES, MANIFESTS_BYTES, MARKER_BYTES
from mooring_agent.core.model import AnnouncementTime, ManifestReference, RankManifest, SaveInfo, SnapshotId
from mooring_agent.core.stored.commit import DIFFERENT_FILES_HINT, contradiction, is_listed, judge_listing
from mooring_agent.core.stored.manifest import (
    commit_marker,
    decode_manifest,
    decode_marker,
    encode_manifest,
    encode_marker,
    largest_manifest_bytes,
    needed_bytes,
    shortage,
)
from mooring_agent.core.stored.object_layout import (
    base_key,
    is_manifest_of,
    manifest_key,
    marker_key,
    save_prefix,
    snapshot_key,
    tombstones_prefix,
)
from mooring_agent.core.stored.reservation import encode_reservation
from mooring_agent.ports import Clock, StoreReader, StoreWriter

_MANIFESTS_AT_ONCE: Final = 16
_TOGETHER_BYTES: Final = 4 * 1024**2
"""The most bytes of rank manifests that are read at a time, unless one alone has more."""

log = structlog.get_logger("mooring.committer")


async def write_manifest(store: StoreWriter, clock: Clock, command: WriteManifest) -> ManifestStored:
    manifest = command.manifest
    key, body = manifest_key(manifest.info, manifest.rank), encode_manifest(manifest)
    _check_readable(decode_manifest, body, key)
    await store.put(key, body)
    return ManifestStored(at=clock.now(), work=command.work)


async def commit(store: StoreWriter, clock: Clock, command: Commit) -> Committed | CommitWaits | ObjectsLost:
    """Try once to commit. Returns Committed after the marker was read back, else what is still missing.

    A marker that names the manifests of this agent is enough: whoever wrote it has compared those of all ranks.
    """
    key = marker_key(command.info)
    found = await read_if_there(store, key)
    if found is not None and _names_ours(found, key, command):
        return await _committed(store, clock, command)
    sizes = await _sizes(store, command.info)
    verdict = judge_listing(command.info, command.manifests, sizes)
    if verdict.lost_files or verdict.lost_packs or verdict.lost_manifests:
        return ObjectsLost(
            at=clock.now(),
            work=command.work,
            files=verdict.lost_files,
            manifests=verdict.lost_manifests,
            packs=verdict.lost_packs,
        )
    if verdict.missing_ranks:
        return CommitWaits(at=clock.now(), work=command.work, missing_ranks=verdict.missing_ranks)
    if found is None and not command.may_write_marker:
        return CommitWaits(at=clock.now(), work=command.work, missing_ranks=0)
    _check_room(command.info, sizes, files=len(sizes))
    manifests = await _all_manifests(store, command, sizes)
    # Check again, with packs and the files in them: restore counts them all.
    files = sum(len(manifest.files) for manifest in manifests.values())
    packs = (size_bytes for manifest in manifests.values() for size_bytes in manifest.pack_sizes_bytes)
    _check_room(command.info, sizes, files=files, largest_pack_bytes=max(packs, default=0))
    unlisted = command.info.world_size - len(manifests)
    unlisted += sum(not is_listed(manifest, sizes) for manifest in manifests.values())
    if unlisted:
        # These are another agent's files, or its manifest: that agent finds them missing and sends them again.
        return CommitWaits(at=clock.now(), work=command.work, missing_ranks=unlisted)
    reason = contradiction(manifests[rank] for rank in sorted(manifests))
    if reason:
        raise StoreError(ErrorKind.CONTRADICTION, f"save {command.info.save}: {reason}", hint=DIFFERENT_FILES_HINT)
    body = _marker_body(manifests)
    if found is None or _is_torn(found, body):
        _check_readable(decode_marker, body, key)
        found = await _write_and_read_back(store, key, body, if_absent=found is None)
    if found != body and await read_if_there(store, key, fresh=True) != body:
        raise StoreError(
            ErrorKind.CHECKPOINT_CORRUPT,
            f"{key} holds a marker that does not match the manifests of save {command.info.save}",
            hint="two jobs write to the same destination with the same save ids; give each run its own prefix",
        )
    return await _committed(store, clock, command)


async def _committed(store: StoreWriter, clock: Clock, command: Commit) -> Committed:
    if command.sweep_uploads:
        # Every rank is sealed, so nobody needs an upload that is still open below this save.
        await sweep_uploads(store, save_prefix(command.info), of=None, keep=frozenset())
    return Committed(at=clock.now(), work=command.work)


def _names_ours(body: bytes, key: str, command: Commit) -> bool:
    try:
        marker = decode_marker(body, key)
    except StoreError:
        return False
    ours = {_reference(manifest.rank, encode_manifest(manifest)) for manifest in command.manifests}
    return marker.info == command.info and ours <= set(marker.manifests)


async def is_committed(store: StoreReader, info: SaveInfo, announced_at: Mapping[int, AnnouncementTime]) -> bool:
    """Whether the save has a whole marker. `announced_at`: when our ranks announced the save, by rank.

    A marker that cannot be decoded commits nothing: `commit` completes one that was cut short, and refuses any other.
    Raises StoreError(CONTRADICTION) when the save belongs to other announcements: then its keys are not ours.
    """
    marker = None
    try:
        marker = await if_there(read_object(store, marker_key(info), decode_marker, limit_bytes=MARKER_BYTES))
        if marker is None:
            return False
    except StoreError as error:
        if error.kind is not ErrorKind.CHECKPOINT_CORRUPT:
            raise
        log.warning("marker.damaged", save=info.save, error=str(error))
    ours = marker is None or marker.info == info
    limit_bytes = largest_manifest_bytes(memory_limit_bytes(), MANIFEST_BYTES)
    for rank in sorted(announced_at) if ours else ():
        found = await _read_manifest_if_there(store, info, rank, limit_bytes=limit_bytes)
        if found is None:
            ours &= marker is None
            continue
        manifest, reference = found
        ours &= announced_at[rank].may_be(manifest.saved_at) and (marker is None or reference in marker.manifests)
    if not ours:
        raise StoreError(
            ErrorKind.CONTRADICTION,
            f"save {info.save} is committed already, by an earlier announcement",
            hint="use a new save id for every save of every attempt",
        )
    return marker is not None


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


async def sweep_uploads(
    store: StoreWriter, prefix: str, *, of: frozenset[str] | None, keep: frozenset[tuple[str, str]]
) -> None:
    """Abort multipart uploads below `prefix`: those for the keys in `of` (None: all), but not those in `keep`.

    `keep` has (key, upload). Other agents upload their ranks' files below the same prefix.
    """
    try:
        found = [one async for one in store.list_uploads(prefix)]
    except StoreError as error:
        if error.kind is not ErrorKind.REQUEST_REFUSED:
            raise
        # The store cannot list uploads, so there is nothing to sweep by.
        log.warning("uploads.not_listable", error=str(error))
        return
    for one in found:
        if (of is None or one.key in of) and (one.key, one.upload) not in keep:
            log.info("uploads.orphan_aborted", key=one.key)
            await store.abort_upload(one.key, one.upload)


def _is_torn(found: bytes, body: bytes) -> bool:
    """Whether `found` is a cut-short write of `body`: some stores keep what arrived before the sender died."""
    return len(found) < len(body) and body.startswith(found)


async def _write_and_read_back(store: StoreWriter, key: str, body: bytes, *, if_absent: bool) -> bytes:
    ambiguous: StoreError | None = None
    try:
        await store.put(key, body, if_absent=if_absent)
    except StoreError as error:
        # Whatever the error is, the write may have worked: 412 and 409 may also follow a lost answer to our own write.
        ambiguous = error
    found = await read_if_there(store, key)
    if found is None:
        raise ambiguous or StoreError(
            ErrorKind.STORE_FAILED,
            f"{key} was written but cannot be read",
            hint="the store broke read-after-write consistency",
        )
    return found


async def read_if_there(store: StoreReader, key: str, *, fresh: bool = False) -> bytes | None:
    """A marker's bytes; None when there is no such object."""
    return await if_there(get_whole(store, key, limit_bytes=MARKER_BYTES, fresh=fresh))


async def _sizes(store: StoreReader, info: SaveInfo) -> dict[str, int]:
    """Return the sizes of all objects of a save by key. Raises BAD_REQUEST if there are more than fit into memory."""
    limit = memory_limit_bytes()
    sizes: dict[str, int] = {}
    async for one in store.list(save_prefix(info)):
        sizes[one.key] = one.size_bytes
        if limit is not None and needed_bytes(files=len(sizes)) > limit:
            raise _too_large_here(shortage(info.name, needed_bytes(files=len(sizes)), limit))
    return sizes


def _check_room(info: SaveInfo, sizes: Mapping[str, int], *, files: int, largest_pack_bytes: int = 0) -> None:
    """Raise BAD_REQUEST unless all listed rank manifests can be read again and fit into this process."""
    manifests_bytes = [size_bytes for key, size_bytes in sizes.items() if is_manifest_of(info, key)]
    if sum(manifests_bytes) > MANIFESTS_BYTES or max(manifests_bytes) > MANIFEST_BYTES:
        raise _not_restorable(
            f"its rank manifests have {sum(manifests_bytes):,} bytes, the largest {max(manifests_bytes):,}; "
            f"the limits are {MANIFESTS_BYTES:,} and {MANIFEST_BYTES:,}"
        )
    limit = memory_limit_bytes()
    needed = needed_bytes(files=files, manifests_bytes=manifests_bytes, largest_pack_bytes=largest_pack_bytes)
    if limit is not None and needed > limit:
        raise _too_large_here(shortage(info.name, needed, limit))


async def _all_manifests(store: StoreReader, command: Commit, sizes: Mapping[str, int]) -> Mapping[int, RankManifest]:
    """Return the manifests by rank, without those that were removed after the listing."""
    manifests = {manifest.rank: manifest for manifest in command.manifests}
    missing = {
        rank: sizes[manifest_key(command.info, rank)]
        for rank in range(command.info.world_size)
        if rank not in manifests
    }

    async def read(rank: int) -> None:
        found = await _read_manifest_if_there(store, command.info, rank, limit_bytes=missing[rank])
        if found is not None:
            manifests[rank], _ = found

    together = at_once(missing.values(), most=_MANIFESTS_AT_ONCE, together_bytes=_TOGETHER_BYTES)
    await for_each(missing, read, at_once=together)
    return manifests


async def _read_manifest_if_there(
    store: StoreReader, info: SaveInfo, rank: int, *, limit_bytes: int
) -> tuple[RankManifest, ManifestReference] | None:
    """Return a rank's manifest and a marker's reference to it. Raises CHECKPOINT_CORRUPT if it is another save's."""

    def decode(body: bytes, key: str) -> tuple[RankManifest, ManifestReference]:
        manifest = decode_manifest(body, key)
        if manifest.info != info or manifest.rank != rank:
            raise StoreError(
                ErrorKind.CHECKPOINT_CORRUPT,
                f"{key} describes {manifest.info}, this agent announced {info}",
                hint="all ranks of one save must give the same name, step, kind and world size",
            )
        return manifest, _reference(rank, body)

    return await if_there(read_object(store, manifest_key(info, rank), decode, limit_bytes=limit_bytes))


def _check_readable(decode: Callable[[bytes, str], object], body: bytes, key: str) -> None:
    """Refuse to write what no restore would read: both have one limit."""
    try:
        decode(body, key)
    except StoreError as error:
        raise _not_restorable(error) from error


def _not_restorable(reason: object) -> RequestError:
    return RequestError(
        ErrorKind.BAD_REQUEST,
        f"nobody could restore this save: {reason}",
        hint="save fewer and larger files, or let fewer ranks write them",
    )


def _too_large_here(error: StoreError) -> RequestError:
    return RequestError(ErrorKind.BAD_REQUEST, f"this agent cannot commit the save: {error}", hint=error.hint)


def _marker_body(manifests: Mapping[int, RankManifest]) -> bytes:
    references = {rank: _reference(rank, encode_manifest(manifest)) for rank, manifest in manifests.items()}
    return encode_marker(commit_marker(list(manifests.values()), references))


def _reference(rank: int, body: bytes) -> ManifestReference:
    return ManifestReference(rank=rank, size_bytes=len(body), checksum=crc64nvme(body))


@dataclass(slots=True)
class _Look:
    """The look for one save's marker. Transfers that wait for it fail with it, so that a dead store is asked once."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    clear: bool = False
    failures: int = 0
    error: MooringError | None = None


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
            except MooringError as error:
                look.error, look.failures = error, look.failures + 1
                raise
            look.clear = True

    def forget(self, save: str) -> None:
        """Forget the look for a save that is over."""
        self._looks.pop(save, None)

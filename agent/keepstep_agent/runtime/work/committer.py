"""Writes manifests and commit markers, and resolves every doubt by reading back. Verdicts: core.stored.commit.

Who lists and writes at what time: core.agent.commit_turns. What a try has read of other agents' manifests is kept for
the next one, because manifests never change: so the last one to come is the only one that is read at the end.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import structlog

from keepstep_agent.adapters.checksum import crc64nvme
from keepstep_agent.adapters.control_group import memory_limit_bytes
from keepstep_agent.catalog.object_reads import at_once, for_each, get_whole, if_there, read_object
from keepstep_agent.core.agent.commands import Commit, Turn, WriteManifest
from keepstep_agent.core.agent.events import Committed, CommitWaits, ManifestStored, ObjectsLost
from keepstep_agent.core.errors import ErrorKind, RequestError, StoreError, checkpoint_corrupt
from keepstep_agent.core.limits import MANIFEST_BYTES, MANIFESTS_BYTES, MARKER_BYTES
from keepstep_agent.core.model import ManifestReference, RankManifest, SaveInfo
from keepstep_agent.core.stored.commit import (
    DIFFERENT_FILES_HINT,
    contradiction,
    is_listed,
    largest_disjoint,
    lost_objects,
    manifest_key_of,
    missing_ranks,
)
from keepstep_agent.core.stored.manifest import (
    check_manifest,
    commit_marker,
    decode_manifest,
    decode_marker,
    encode_manifest,
    encode_marker,
    manifest_pieces,
    shortage,
)
from keepstep_agent.core.stored.object_layout import (
    manifests_prefix,
    marker_key,
    parse_manifest_key,
    save_prefix,
)
from keepstep_agent.ports import Clock, StoreReader, StoreWriter

_MANIFESTS_AT_ONCE: Final = 16
_TOGETHER_BYTES: Final = 4 * 1024**2
"""The most bytes of manifests that are read at a time, unless one alone has more."""

log = structlog.get_logger("keepstep.committer")


async def write_manifest(store: StoreWriter, clock: Clock, command: WriteManifest) -> ManifestStored:
    key, body = manifest_key_of(command.ranks), encode_manifest(command.ranks)
    _check_readable(check_manifest, body, key)
    await store.put(key, body)
    return ManifestStored(at=clock.now(), work=command.work)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Manifest:
    ranks: Sequence[RankManifest]
    reference: ManifestReference


class Committer:
    """Tries to commit saves, and keeps what it has read of those that wait for other agents."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._read: dict[str, dict[str, _Manifest]] = {}

    async def commit(self, store: StoreWriter, command: Commit) -> Committed | CommitWaits | ObjectsLost:
        """Try once to commit. Returns Committed after the marker was read back, else what is still missing.

        A marker that names our manifest is enough: whoever wrote it has compared those of all ranks.
        """
        info, key = command.info, marker_key(command.info)
        found = await read_if_there(store, key)
        if found is not None and self._names_ours(found, key, command):
            return await self._committed(store, command)
        if found is None and command.turn is Turn.READ:
            return self._waits(command)
        alone = len(command.ranks) == info.world_size
        listed = await _sizes(store, info, save_prefix(info) if alone else manifests_prefix(info))
        if listed.get(manifest_key_of(command.ranks)) != self._ours(command).reference.size_bytes:
            return ObjectsLost(at=self._clock.now(), work=command.work)
        missing = missing_ranks(info, listed)
        sizes = listed

        async def read_manifests() -> None:
            if command.turn is Turn.WRITE:
                _check_room(info, listed, files=len(listed))
                await self._read_new(store, command, listed)

        async def list_files() -> None:
            # What is listed from now on includes the files of every rank, as each manifest is stored after its files.
            nonlocal sizes
            if not alone and not missing:
                sizes = await _sizes(store, info, save_prefix(info))

        await for_each((read_manifests, list_files), lambda work: work(), at_once=2)
        if missing:
            return self._waits(command, missing)
        lost = lost_objects(command.ranks, sizes)
        if lost:
            return ObjectsLost(at=self._clock.now(), work=command.work, files=lost.files, packs=lost.packs)
        if found is None and command.turn is not Turn.WRITE:
            return self._waits(command, 0)
        return await self._write_marker(store, command, sizes, found)

    def forget(self, save: str) -> None:
        """Forget what was read of a save that is over."""
        self._read.pop(save, None)

    async def _write_marker(
        self, store: StoreWriter, command: Commit, sizes: Mapping[str, int], found: bytes | None
    ) -> Committed | CommitWaits:
        info, key = command.info, marker_key(command.info)
        read = await self._read_new(store, command, sizes)
        chosen = largest_disjoint(one.ranks for manifest_key, one in read.items() if manifest_key in sizes)
        ranks = sorted((one for together in chosen for one in together), key=lambda one: one.rank)
        # Check again, with packs and the files in them: restore counts them all.
        packs = (size_bytes for one in ranks for size_bytes in one.pack_sizes_bytes)
        files = sum(len(one.files) for one in ranks)
        _check_room(info, sizes, files=files, largest_pack_bytes=max(packs, default=0))
        unlisted = info.world_size - sum(is_listed(one, sizes) for one in ranks)
        if unlisted:
            # These are another agent's files, or its manifest: that agent finds them missing and sends them again.
            return self._waits(command, unlisted)
        reason = contradiction(ranks)
        if reason:
            raise StoreError(ErrorKind.CONTRADICTION, f"save {info.save}: {reason}", hint=DIFFERENT_FILES_HINT)
        references = [read[manifest_key_of(together)].reference for together in chosen]
        body = encode_marker(commit_marker(ranks, references))
        if found is None or _is_torn(found, body):
            _check_readable(decode_marker, body, key)
            found = await _write_and_read_back(store, key, body, if_absent=found is None)
        if found != body and await read_if_there(store, key, fresh=True) != body:
            raise StoreError(
                ErrorKind.CHECKPOINT_CORRUPT,
                f"{key} holds a marker that does not match the manifests of save {info.save}",
                hint="two jobs write to the same destination with the same save ids; give each run its own prefix",
            )
        return await self._committed(store, command)

    async def _read_new(self, store: StoreReader, command: Commit, sizes: Mapping[str, int]) -> Mapping[str, _Manifest]:
        """Read the listed manifests that were not read before. Those that were removed meanwhile are left out."""
        info = command.info
        read = self._read[info.save]
        new = {key: size for key, size in sizes.items() if key not in read and parse_manifest_key(info, key)}

        async def read_one(key: str) -> None:
            found = await if_there(read_object(store, key, partial(_decode, info), limit_bytes=new[key]))
            if found is not None:
                read[key] = found

        together = at_once(new.values(), most=_MANIFESTS_AT_ONCE, together_bytes=_TOGETHER_BYTES)
        await for_each(new, read_one, at_once=together)
        return read

    def _ours(self, command: Commit) -> _Manifest:
        read, key = self._read.setdefault(command.info.save, {}), manifest_key_of(command.ranks)
        if key not in read:
            reference = _reference(command.ranks, manifest_pieces(command.ranks))
            read[key] = _Manifest(ranks=command.ranks, reference=reference)
        return read[key]

    def _names_ours(self, body: bytes, key: str, command: Commit) -> bool:
        try:
            marker = decode_marker(body, key)
        except StoreError:
            return False
        return marker.info == command.info and self._ours(command).reference in marker.manifests

    def _waits(self, command: Commit, missing: int | None = None) -> CommitWaits:
        return CommitWaits(at=self._clock.now(), work=command.work, missing_ranks=missing)

    async def _committed(self, store: StoreWriter, command: Commit) -> Committed:
        self.forget(command.info.save)
        if command.sweep_uploads:
            # Every rank is sealed, so nobody needs an upload that is still open below this save.
            await sweep_uploads(store, save_prefix(command.info), of=None, keep=frozenset())
        return Committed(at=self._clock.now(), work=command.work)


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


async def _sizes(store: StoreReader, info: SaveInfo, prefix: str) -> dict[str, int]:
    """Return the sizes of the objects below `prefix` by key. Raises BAD_REQUEST if more than fit into memory."""
    limit = memory_limit_bytes()
    sizes: dict[str, int] = {}
    async for one in store.list(prefix):
        sizes[one.key] = one.size_bytes
        if error := shortage(info.name, limit, files=len(sizes)):
            raise _too_large_here(error)
    return sizes


def _check_room(info: SaveInfo, sizes: Mapping[str, int], *, files: int, largest_pack_bytes: int = 0) -> None:
    """Raise BAD_REQUEST unless all listed manifests can be read again and fit into this process."""
    manifests_bytes = [size_bytes for key, size_bytes in sizes.items() if parse_manifest_key(info, key)]
    if sum(manifests_bytes) > MANIFESTS_BYTES or max(manifests_bytes) > MANIFEST_BYTES:
        raise _not_restorable(
            f"its manifests have {sum(manifests_bytes):,} bytes, the largest {max(manifests_bytes):,}; "
            f"the limits are {MANIFESTS_BYTES:,} and {MANIFEST_BYTES:,}"
        )
    error = shortage(
        info.name,
        memory_limit_bytes(),
        files=files,
        manifests_bytes=manifests_bytes,
        largest_pack_bytes=largest_pack_bytes,
    )
    if error is not None:
        raise _too_large_here(error)


def _decode(info: SaveInfo, body: bytes, key: str) -> _Manifest:
    ranks = decode_manifest(body, key)
    if ranks[0].info != info:
        raise StoreError(
            ErrorKind.CHECKPOINT_CORRUPT,
            f"{key} describes {ranks[0].info}, this agent announced {info}",
            hint="all ranks of one save must give the same name, step, kind and world size",
        )
    if manifest_key_of(ranks) != key:
        raise checkpoint_corrupt(f"{key} does not have the ranks that its name says")
    return _Manifest(ranks=ranks, reference=_reference(ranks, (body,)))


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


def _reference(ranks: Sequence[RankManifest], pieces: Iterable[bytes]) -> ManifestReference:
    size_bytes = checksum = 0
    for piece in pieces:
        size_bytes += len(piece)
        checksum = crc64nvme(piece, checksum)
    return ManifestReference(
        first_rank=min(one.rank for one in ranks),
        rank_count=len(ranks),
        size_bytes=size_bytes,
        checksum=checksum,
    )

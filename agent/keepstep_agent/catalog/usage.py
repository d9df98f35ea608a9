"""Reads what `keepstep du` reports: one flat listing of a prefix, the unfinished uploads below it, and a few markers.

Invariants: writes nothing; sends requests per run, not per checkpoint, unless all markers are asked for; what the store
does not say is noted and not guessed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from keepstep_agent.catalog.markers import committed_save, read_marker, weights_only_save
from keepstep_agent.catalog.object_reads import DAMAGE, for_each
from keepstep_agent.core.errors import ErrorKind, StoreError
from keepstep_agent.core.model import Kind
from keepstep_agent.core.policies.restore_choice import CommittedSave, by_line, last_commits
from keepstep_agent.core.policies.run_census import Census, StoredRun, UnfinishedUpload
from keepstep_agent.core.policies.storage_use import AgeLimits, RunUse, Usage, usage_of, use_of
from keepstep_agent.core.stored.object_layout import run_of_record
from keepstep_agent.ports import ObjectInfo, StoreReader, UploadInfo

_REQUESTS_AT_ONCE: Final = 8
MOST_SIZED_UPLOADS: Final = 10_000
"""How many uploads are asked for their parts, the oldest first. The bytes of the others are not known."""
_UNSAID: Final = frozenset({ErrorKind.ACCESS_DENIED, ErrorKind.REQUEST_REFUSED})
"""The store, or its policy, does not let us ask."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageUse:
    """What takes the room below a prefix.

    `outside` lies in no run. `unsized_uploads` are counted without their bytes. `uploads_unknown` says why unfinished
    uploads are not known at all. `unread` are the keys of markers that could not be read.
    """

    runs: tuple[RunUse, ...]
    outside: Usage
    unsized_uploads: int = 0
    uploads_unknown: str = ""
    unread: tuple[str, ...] = ()

    @property
    def total(self) -> Usage:
        total = Usage()
        for usage in (*(one.usage for one in self.runs), self.outside):
            total.merge(usage)
        return total


async def storage_use(store: StoreReader, limits: AgeLimits, *, every_kind: bool = False) -> StorageUse:
    """Return what takes the room in `store`, which may hold many runs.

    Reads the marker of each run's newest checkpoint, and of what the store holds last, to tell when it was committed;
    with `every_kind` that of every checkpoint, to tell their kinds.
    """
    census = Census()
    async for one in store.list(""):
        census.add(one.key, one.size_bytes, one.modified_at)
        run = run_of_record(one.key)
        if run is not None and (marker := _marker(replace(one, key=one.key.removeprefix(run)))):
            census.add_marker(run, marker)
    uploads, unsized, unknown = await _unfinished_uploads(store)
    runs, outside = census.runs(uploads)
    kinds, unread = await _read_markers(store, runs, every_kind=every_kind)
    return StorageUse(
        runs=tuple(use_of(run, kinds[run.prefix], limits, every_kind=every_kind) for run in runs),
        outside=usage_of(outside, {}, limits),
        unsized_uploads=unsized,
        uploads_unknown=unknown,
        unread=tuple(sorted(unread)),
    )


def _marker(listed: ObjectInfo) -> CommittedSave | None:
    return committed_save(listed) or weights_only_save(listed)


async def _unfinished_uploads(store: StoreReader) -> tuple[list[UnfinishedUpload], int, str]:
    """Return the uploads, of how many of them the bytes are not known, and why none are known."""
    try:
        listed = sorted([one async for one in store.list_uploads("")], key=lambda one: one.started_at)
    except StoreError as error:
        if error.kind not in _UNSAID:
            raise
        return [], 0, str(error)
    found: list[UnfinishedUpload] = []
    unsized = sum(one.size_bytes is None for one in listed[MOST_SIZED_UPLOADS:])

    async def measure(one: UploadInfo) -> None:
        nonlocal unsized
        size_bytes = one.size_bytes
        if size_bytes is None:
            try:
                size_bytes = sum(part.size_bytes for part in await store.list_parts(one.key, one.upload))
            except StoreError as error:
                if error.kind is ErrorKind.UPLOAD_LOST:  # it has ended since it was listed
                    return
                if error.kind not in _UNSAID:
                    raise
                size_bytes, unsized = 0, unsized + 1
        found.append(UnfinishedUpload(key=one.key, started_at=one.started_at, size_bytes=size_bytes))

    await for_each(listed[:MOST_SIZED_UPLOADS], measure, at_once=_REQUESTS_AT_ONCE)
    found += [
        UnfinishedUpload(key=one.key, started_at=one.started_at, size_bytes=one.size_bytes or 0)
        for one in listed[MOST_SIZED_UPLOADS:]
    ]
    return found, unsized, ""


async def _read_markers(
    store: StoreReader, runs: Sequence[StoredRun], *, every_kind: bool
) -> tuple[dict[str, dict[str, Kind]], list[str]]:
    """Return the kinds by run and by the marker's key in the run, and the keys of the markers that cannot be read.

    Notes in the runs when the saves were committed whose markers it reads.
    """
    kinds: dict[str, dict[str, Kind]] = {run.prefix: {} for run in runs}
    unread: list[str] = []

    async def read(place: tuple[StoredRun, CommittedSave]) -> None:
        run, one = place
        try:
            marker = await read_marker(store, one, run=run.prefix)
        except StoreError as error:
            if error.kind not in (*DAMAGE, ErrorKind.FORMAT_UNKNOWN, ErrorKind.ACCESS_DENIED):
                raise
            unread.append(run.prefix + one.key)
            return
        run.committed[run.committed.index(one)] = replace(one, saved_at=marker.saved_at)
        if not one.series:
            kinds[run.prefix][one.key] = marker.info.kind

    # Which output directory was committed to last, only these markers say; so the newest are known after them.
    for wanted in (_last_commits, _announced if every_kind else _newest):
        places = [
            (run, one) for run in runs for one in wanted(run) if not one.saved_at and run.prefix + one.key not in unread
        ]
        await for_each(places, read, at_once=_REQUESTS_AT_ONCE)
    return kinds, unread


def _announced(run: StoredRun) -> list[CommittedSave]:
    return [one for one in run.committed if not one.series and not one.weights_only]


def _newest(run: StoredRun) -> list[CommittedSave]:
    return run.newest


def _last_commits(run: StoredRun) -> list[CommittedSave]:
    """Return the saves of which one was committed last: of each output directory two, and the youngest of the run."""
    whole = [one for one in run.committed if not one.weights_only]
    found = [one for line in by_line(_announced(run)).values() for one in last_commits(line)]
    found += [max(whole, key=lambda one: one.modified_at)] if whole else []
    return list(dict.fromkeys(found))

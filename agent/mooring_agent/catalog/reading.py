"""Reading one destination: which saves are committed, and whether marker, rank manifests and listing agree.

Owns every check that needs no file's bytes. Invariants: what `load` returns is complete by its own word (every rank,
every file, every size) and safe to put on a disk (no path leaves the checkpoint); every problem names its object.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from mooring_agent.adapters.checksum import crc64nvme
from mooring_agent.catalog.fan_out import for_each
from mooring_agent.catalog.small_objects import read_object
from mooring_agent.core.errors import ErrorKind, MooringError, StoreError
from mooring_agent.core.limits import MARKER_BYTES
from mooring_agent.core.manifest import decode_manifest, decode_marker
from mooring_agent.core.model import CommitMarker, FileEntry, ManifestReference, RankManifest
from mooring_agent.core.object_layout import (
    COMMITS_PREFIX,
    file_key,
    is_manifest_of,
    manifest_key,
    manifests_prefix,
    pack_key,
    parse_marker_key,
    save_prefix,
)
from mooring_agent.core.restore_choice import CommittedSave, newest_first
from mooring_agent.ports import ObjectInfo, ObjectStore

_MANIFESTS_AT_ONCE: Final = 8
# The answers that mean "this object is not what was written", as opposed to "the store cannot say now".
DAMAGE: Final = frozenset({ErrorKind.CHECKPOINT_CORRUPT, ErrorKind.NOT_FOUND})


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What is wrong with one object of a checkpoint."""

    key: str
    what: str

    def __str__(self) -> str:
        return f"{self.key} {self.what}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """A file of a checkpoint and the object that holds it, or its pack.

    `etag` is the listing's: reads of a part insist on it; a pack is read whole, and judged by its files' checksums
    alone. `object_bytes` is the object's size.
    """

    entry: FileEntry
    key: str
    etag: str
    object_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedCheckpoint:
    """A checkpoint whose marker, rank manifests and listing agree. `files` has each path once.

    What is put on a disk is a folder of them; `single_file`: that file itself.
    """

    committed: CommittedSave
    marker: CommitMarker
    manifests: tuple[RankManifest, ...]
    files: tuple[StoredFile, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes on a local disk."""
        return sum(file.entry.size_bytes for file in self.files)

    @property
    def single_file(self) -> bool:
        """All ranks that brought something announced this one file; ranks with a file of their own make a folder."""
        return len(self.files) == 1 and all(one.single_file for one in self.manifests if one.files)


@dataclass(slots=True, kw_only=True)
class Examination:
    """Everything found out about one committed save; `checkpoint` only when there is no problem."""

    problems: list[Problem] = field(default_factory=list)
    checkpoint: CommittedCheckpoint | None = None
    manifests: list[RankManifest] = field(default_factory=list)
    files: dict[str, StoredFile] = field(default_factory=dict)


async def list_committed(store: ObjectStore) -> tuple[CommittedSave, ...]:
    """Every save with a commit marker, newest first. Reads only markers that share a step with another."""
    found = [one async for listed in store.list(COMMITS_PREFIX) if (one := committed_save(listed))]
    per_step = Counter(one.step for one in found)
    return newest_first(
        [one if per_step[one.step] == 1 else replace(one, saved_at=await _saved_at(store, one)) for one in found]
    )


async def read_marker(store: ObjectStore, committed: CommittedSave) -> CommitMarker:
    """The commit marker of a save. StoreError(CHECKPOINT_CORRUPT) that names it if it is not what was written."""

    def decode(body: bytes, key: str) -> CommitMarker:
        marker = decode_marker(body, key)
        if (marker.info.step, marker.info.save) != (committed.step, committed.save):
            what = f"is the marker of step {marker.info.step} (save {marker.info.save})"
            raise _corrupt([Problem(key=key, what=what)])
        return marker

    try:
        return await read_object(store, committed.key, decode, limit_bytes=MARKER_BYTES)
    except StoreError as error:
        if error.kind in DAMAGE:
            raise _corrupt(_problem(committed.key, error)) from error
        raise


async def load(store: ObjectStore, committed: CommittedSave) -> CommittedCheckpoint:
    """The checkpoint, checked as far as is possible without its bytes. StoreError(CHECKPOINT_CORRUPT) otherwise."""
    examination = await examine(store, committed)
    if examination.checkpoint is None:
        raise _corrupt(examination.problems)
    return examination.checkpoint


async def examine(store: ObjectStore, committed: CommittedSave) -> Examination:
    """Marker against rank manifests against listing, collecting every problem. Raises only what the store raises.

    What one look finds wrong, another may not: a problem is what the second one finds.
    """
    examination = await _examine(store, committed)
    return examination if examination.checkpoint else await _examine(store, committed)


async def _examine(store: ObjectStore, committed: CommittedSave) -> Examination:
    examination = Examination()
    try:
        marker = await read_marker(store, committed)
    except StoreError as error:
        if error.kind not in DAMAGE:
            raise
        examination.problems.append(Problem(key=committed.key, what=str(error).removeprefix(f"{committed.key} ")))
        return examination
    objects = {one.key: one async for one in store.list(save_prefix(marker.info))}
    await _examine_manifests(store, marker, objects, examination)
    for manifest in examination.manifests:
        _examine_files(manifest, objects, examination)
    _examine_paths(examination)
    if not examination.problems:
        _examine_totals(committed, marker, examination)
    if not examination.problems:
        examination.checkpoint = CommittedCheckpoint(
            committed=committed,
            marker=marker,
            manifests=tuple(examination.manifests),
            files=tuple(file for _, file in sorted(examination.files.items())),
        )
    return examination


def committed_save(marker: ObjectInfo) -> CommittedSave | None:
    """What a listed marker's key says; None for any other object."""
    parsed = parse_marker_key(marker.key)
    if parsed is None:
        return None
    return CommittedSave(key=marker.key, step=parsed[0], save=parsed[1], modified_at=marker.modified_at)


async def _saved_at(store: ObjectStore, committed: CommittedSave) -> float:
    try:
        return (await read_marker(store, committed)).saved_at
    except StoreError as error:
        if error.kind not in DAMAGE:
            raise
        return 0.0


async def _examine_manifests(
    store: ObjectStore, marker: CommitMarker, objects: dict[str, ObjectInfo], examination: Examination
) -> None:
    async def read(reference: ManifestReference) -> None:
        answer = await _read_manifest(store, marker, reference, objects)
        if isinstance(answer, Problem):
            examination.problems.append(answer)
        else:
            examination.manifests.append(answer)

    await for_each(marker.manifests, read, at_once=_MANIFESTS_AT_ONCE)
    examination.manifests.sort(key=lambda manifest: manifest.rank)
    for key in sorted(objects):
        if key.startswith(manifests_prefix(marker.info)) and not is_manifest_of(marker.info, key):
            what = f"is more than the {marker.info.world_size} rank manifests that the marker names"
            examination.problems.append(Problem(key=key, what=what))


async def _read_manifest(
    store: ObjectStore, marker: CommitMarker, reference: ManifestReference, objects: dict[str, ObjectInfo]
) -> RankManifest | Problem:
    key = manifest_key(marker.info, reference.rank)
    listed = objects.get(key)
    if listed is None:
        return Problem(key=key, what="is missing")
    if listed.size_bytes != reference.size_bytes:
        return Problem(key=key, what=f"has {listed.size_bytes} bytes, the marker says {reference.size_bytes}")

    def decode(body: bytes, key: str) -> RankManifest:
        if crc64nvme(body) != reference.checksum:
            raise _corrupt([Problem(key=key, what="does not have the checksum that the marker says")])
        manifest = decode_manifest(body, key)
        if (manifest.info, manifest.rank) != (marker.info, reference.rank):
            raise _corrupt([Problem(key=key, what="is the manifest of another save or rank")])
        return manifest

    try:
        return await read_object(store, key, decode, limit_bytes=reference.size_bytes)
    except StoreError as error:
        if error.kind not in DAMAGE:
            raise
        return _problem(key, error)[0]


def _examine_files(manifest: RankManifest, objects: dict[str, ObjectInfo], examination: Examination) -> None:
    info = manifest.info
    packs = [
        _listed(pack_key(info, manifest.rank, number), size_bytes, objects, examination)
        for number, size_bytes in enumerate(manifest.pack_sizes_bytes)
    ]
    for entry in manifest.files:
        if entry.place:
            listed = packs[entry.place.number]
        else:
            listed = _listed(file_key(info, entry.path), entry.size_bytes, objects, examination)
        if listed is None:
            continue
        found = StoredFile(entry=entry, key=listed.key, etag=listed.etag, object_bytes=listed.size_bytes)
        known = examination.files.setdefault(entry.path, found)
        if not known.entry.has_bytes_of(entry):
            what = "is claimed by two ranks with different bytes"
            examination.problems.append(Problem(key=file_key(info, entry.path), what=what))


def _listed(key: str, size_bytes: int, objects: dict[str, ObjectInfo], examination: Examination) -> ObjectInfo | None:
    """The object, if it is as its rank manifest says."""
    listed = objects.get(key)
    if listed is None:
        examination.problems.append(Problem(key=key, what="is missing"))
        return None
    if listed.size_bytes != size_bytes:
        what = f"has {listed.size_bytes} bytes, its rank manifest says {size_bytes}"
        examination.problems.append(Problem(key=key, what=what))
        return None
    return listed


def _examine_paths(examination: Examination) -> None:
    """A key can be both a file and a folder in a bucket; on a disk it cannot."""
    for path, file in examination.files.items():
        folder = path
        while "/" in folder:
            folder = folder.rpartition("/")[0]
            if folder in examination.files:
                examination.problems.append(Problem(key=file.key, what=f"lies below the file {folder}"))


def _examine_totals(committed: CommittedSave, marker: CommitMarker, examination: Examination) -> None:
    size_bytes = sum(manifest.size_bytes for manifest in examination.manifests)
    file_count = sum(len(manifest.files) for manifest in examination.manifests)
    if (marker.size_bytes, marker.file_count) != (size_bytes, file_count):
        what = (
            f"says {marker.file_count} files and {marker.size_bytes} bytes, "
            f"the rank manifests {file_count} and {size_bytes}"
        )
        examination.problems.append(Problem(key=committed.key, what=what))


def _problem(key: str, error: MooringError) -> list[Problem]:
    what = "is missing" if error.kind is ErrorKind.NOT_FOUND else str(error).removeprefix(f"{key} ")
    return [Problem(key=key, what=what)]


def _corrupt(problems: Sequence[Problem]) -> StoreError:
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return StoreError(
        ErrorKind.CHECKPOINT_CORRUPT,
        f"{problems[0]}{more}",
        hint="restore falls back to the next older checkpoint; `mooring verify` shows all that is damaged",
    )

"""Reads one destination: which saves are committed, and whether marker, rank manifests and listing agree.

Owns every check that needs no file's bytes. Invariants: what `load` returns is complete by its own account (every rank,
every file, every size) and safe to put on a disk (no path leaves the checkpoint); every problem names its object.
"""

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Final

from mooring_agent.adapters.checksum import crc64nvme
from mooring_agent.adapters.control_group import memory_limit_bytes
from mooring_agent.catalog.object_reads import at_once, for_each, if_there, read_object
from mooring_agent.core.errors import ErrorKind, MooringError, StoreError, checkpoint_corrupt
from mooring_agent.core.limits import MARKER_BYTES
from mooring_agent.core.model import CommitMarker, FileEntry, ManifestReference, RankManifest
from mooring_agent.core.policies.restore_choice import CommittedSave, newest_first
from mooring_agent.core.stored.manifest import decode_manifest, decode_marker, needed_bytes, shortage
from mooring_agent.core.stored.object_layout import (
    COMMITS_PREFIX,
    file_key,
    is_manifest_of,
    manifest_key,
    manifests_prefix,
    marker_key,
    pack_key,
    parse_marker_key,
    save_prefix,
)
from mooring_agent.ports import ObjectInfo, StoreReader

_MANIFESTS_AT_ONCE: Final = 8
_TOGETHER_BYTES: Final = 4 * 1024**2
"""The most bytes of rank manifests that are read at a time, unless one alone has more."""
_LEAST_ENTRY_BYTES: Final = 40
"""The minimum size of a file's entry in a rank manifest."""
_OTHER_OBJECTS: Final = 1_000
"""How many objects a save's folder may have beyond twice its files and ranks: a restarted agent may pack anew."""
_PROBLEMS: Final = 1_000
"""How many problems are kept. The rest are only counted."""
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
    """A file of a checkpoint and the object that holds it: its own, or its pack.

    `version` is the listing's. Reads of a part insist on it; a pack is read whole, and judged by its files' checksums
    alone. `object_bytes` is the object's size.
    """

    entry: FileEntry
    key: str
    version: str
    object_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedCheckpoint:
    """A checkpoint whose marker, rank manifests and listing agree. `files` has each path once.

    On a disk the checkpoint is a folder of these files, or with `single_file` that file itself.
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
        """Whether all ranks that contributed something announced this one file. Ranks with own files make a folder."""
        return len(self.files) == 1 and all(one.single_file for one in self.manifests if one.files)


@dataclass(slots=True, kw_only=True)
class Examination:
    """Everything found out about one committed save. `checkpoint` is set only if there is no problem.

    `shortage` says that memory is too short to look further. It is also among the problems, although the save may be
    intact.
    """

    problems: list[Problem] = field(default_factory=list)
    shortage: StoreError | None = None
    checkpoint: CommittedCheckpoint | None = None
    manifests: list[RankManifest] = field(default_factory=list)
    files: dict[str, StoredFile] = field(default_factory=dict)
    more_problems: int = 0

    def add(self, key: str, what: str) -> None:
        if len(self.problems) < _PROBLEMS:
            self.problems.append(Problem(key=key, what=what))
        else:
            self.more_problems += 1


async def list_committed(store: StoreReader) -> tuple[CommittedSave, ...]:
    """Return every save with a commit marker, newest first. Reads only markers that share a step with another."""
    found = [one async for listed in store.list(COMMITS_PREFIX) if (one := committed_save(listed))]
    per_step = Counter(one.step for one in found)
    return newest_first(
        [one if per_step[one.step] == 1 else replace(one, saved_at=await _saved_at(store, one)) for one in found]
    )


async def read_marker(store: StoreReader, committed: CommittedSave) -> CommitMarker:
    """Return the commit marker of a save.

    Raises StoreError(CHECKPOINT_CORRUPT), which names the marker, if it is missing or not what was written.
    """

    def decode(body: bytes, key: str) -> CommitMarker:
        marker = decode_marker(body, key)
        if (marker.info.step, marker.info.save) != (committed.step, committed.save):
            raise checkpoint_corrupt(f"{key} is the marker of step {marker.info.step} (save {marker.info.save})")
        return marker

    try:
        return await read_object(store, committed.key, decode, limit_bytes=MARKER_BYTES)
    except StoreError as error:
        if error.kind in DAMAGE:
            raise checkpoint_corrupt(f"{committed.key} {_what(committed.key, error)}") from error
        raise


async def has_marker(store: StoreReader, committed: CommittedSave) -> bool:
    """Return whether the save still has its marker. A deletion removes that first, and what is left looks damaged."""
    return await if_there(store.head(committed.key)) is not None


async def load(store: StoreReader, committed: CommittedSave) -> CommittedCheckpoint:
    """Return the checkpoint, checked as far as is possible without its files' bytes.

    Raises StoreError(CHECKPOINT_CORRUPT) if a check fails, and StoreError(MEMORY_SHORT) if its rank manifests do not
    fit into the memory that this process may have.
    """
    examination = await examine(store, committed)
    if examination.shortage:
        raise examination.shortage
    if examination.checkpoint is None:
        count = len(examination.problems) - 1 + examination.more_problems
        more = f" (and {count} more)" if count else ""
        raise checkpoint_corrupt(f"{examination.problems[0]}{more}")
    return examination.checkpoint


async def examine(store: StoreReader, committed: CommittedSave) -> Examination:
    """Compare marker, rank manifests and listing, and collect every problem. Raises only what the store raises.

    If the first look finds problems, a second look is taken, and only its problems count.
    """
    examination = await _examine(store, committed)
    if examination.checkpoint or examination.shortage:
        return examination
    # Memory is estimated for one examination at a time.
    del examination
    return await _examine(store, committed)


async def _examine(store: StoreReader, committed: CommittedSave) -> Examination:
    examination = Examination()
    try:
        marker = await read_marker(store, committed)
    except StoreError as error:
        if error.kind not in DAMAGE:
            raise
        examination.add(committed.key, _what(committed.key, error))
        return examination
    if not _has_room(marker, examination):
        return examination
    objects = await _objects(store, marker, examination)
    if not examination.problems:
        await _examine_manifests(store, marker, objects, examination)
    if examination.shortage:
        return examination
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
    """Return what the key of a listed marker says; None for any other object."""
    parsed = parse_marker_key(marker.key)
    if parsed is None:
        return None
    return CommittedSave(key=marker.key, step=parsed[0], save=parsed[1], modified_at=marker.modified_at)


async def _saved_at(store: StoreReader, committed: CommittedSave) -> float:
    try:
        return (await read_marker(store, committed)).saved_at
    except StoreError as error:
        if error.kind not in (*DAMAGE, ErrorKind.FORMAT_UNKNOWN):
            raise
        return 0.0


def _has_room(marker: CommitMarker, examination: Examination, *, largest_pack_bytes: int = 0) -> bool:
    """Return whether what the marker names fits into memory. If not, note a shortage.

    A file count that cannot be true is noted as a problem.
    """
    sizes = [reference.size_bytes for reference in marker.manifests]
    if marker.file_count * _LEAST_ENTRY_BYTES > sum(sizes):
        what = f"names {marker.file_count} files, more than rank manifests of {sum(sizes)} bytes can list"
        examination.add(marker_key(marker.info), what)
        return False
    needed = needed_bytes(files=marker.file_count, manifests_bytes=sizes, largest_pack_bytes=largest_pack_bytes)
    limit = memory_limit_bytes()
    if limit is None or needed <= limit:
        return True
    examination.shortage = shortage(f"{marker.info.name} (save {marker.info.save})", needed, limit)
    examination.add(marker_key(marker.info), str(examination.shortage))
    return False


async def _objects(store: StoreReader, marker: CommitMarker, examination: Examination) -> dict[str, ObjectInfo]:
    """Return the objects of a save, by key. Stops with a problem at more objects than a save may have."""
    objects: dict[str, ObjectInfo] = {}
    most = 2 * (marker.file_count + marker.info.world_size) + _OTHER_OBJECTS
    async for one in store.list(save_prefix(marker.info)):
        if len(objects) == most:
            what = f"has more than {most} objects, and its marker names {marker.file_count} files"
            examination.add(save_prefix(marker.info), what)
            break
        objects[one.key] = one
    return objects


async def _examine_manifests(
    store: StoreReader, marker: CommitMarker, objects: dict[str, ObjectInfo], examination: Examination
) -> None:
    files = 0

    async def read(reference: ManifestReference) -> None:
        nonlocal files
        if files > marker.file_count:
            # Reported once, at the end. More manifests would not fit into the memory that was checked.
            return
        manifest = await _read_manifest(store, marker, reference, objects, examination)
        if manifest is not None:
            files += len(manifest.files)
            examination.manifests.append(manifest)

    sizes = [reference.size_bytes for reference in marker.manifests]
    together = at_once(sizes, most=_MANIFESTS_AT_ONCE, together_bytes=_TOGETHER_BYTES)
    await for_each(marker.manifests, read, at_once=together)
    examination.manifests.sort(key=lambda manifest: manifest.rank)
    if files > marker.file_count:
        what = f"names {marker.file_count} files, the rank manifests at least {files}"
        examination.add(marker_key(marker.info), what)
        examination.manifests.clear()
    for key in sorted(objects):
        if key.startswith(manifests_prefix(marker.info)) and not is_manifest_of(marker.info, key):
            examination.add(key, f"is not one of the {marker.info.world_size} rank manifests that the marker names")
    packs = [size_bytes for manifest in examination.manifests for size_bytes in manifest.pack_sizes_bytes]
    _has_room(marker, examination, largest_pack_bytes=max(packs, default=0))


async def _read_manifest(
    store: StoreReader,
    marker: CommitMarker,
    reference: ManifestReference,
    objects: dict[str, ObjectInfo],
    examination: Examination,
) -> RankManifest | None:
    """Return the rank manifest if it is as the marker says; otherwise add a problem and return None."""
    key = manifest_key(marker.info, reference.rank)
    if _listed(key, reference.size_bytes, objects, examination, says="the marker") is None:
        return None

    def decode(body: bytes, key: str) -> RankManifest:
        if crc64nvme(body) != reference.checksum:
            raise checkpoint_corrupt(f"{key} does not have the checksum that the marker says")
        manifest = decode_manifest(body, key)
        if (manifest.info, manifest.rank) != (marker.info, reference.rank):
            raise checkpoint_corrupt(f"{key} is the manifest of another save or rank")
        return manifest

    try:
        return await read_object(store, key, decode, limit_bytes=reference.size_bytes)
    except StoreError as error:
        if error.kind not in DAMAGE:
            raise
        examination.add(key, _what(key, error))
        return None


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
        found = StoredFile(entry=entry, key=listed.key, version=listed.version, object_bytes=listed.size_bytes)
        known = examination.files.setdefault(entry.path, found)
        if not known.entry.has_bytes_of(entry):
            examination.add(file_key(info, entry.path), "has different bytes on two ranks")


def _listed(
    key: str,
    size_bytes: int,
    objects: dict[str, ObjectInfo],
    examination: Examination,
    *,
    says: str = "its rank manifest",
) -> ObjectInfo | None:
    """Return the listed object if it has the size that `says` names; otherwise add a problem and return None."""
    listed = objects.get(key)
    if listed is None:
        examination.add(key, "is missing")
        return None
    if listed.size_bytes != size_bytes:
        examination.add(key, f"has {listed.size_bytes} bytes, {says} says {size_bytes}")
        return None
    return listed


def _examine_paths(examination: Examination) -> None:
    """Add a problem for each file that lies below another file: a bucket allows that, a disk does not."""
    for path, file in examination.files.items():
        folder = path
        while "/" in folder:
            folder = folder.rpartition("/")[0]
            if folder in examination.files:
                examination.add(file.key, f"lies below the file {folder}")


def _examine_totals(committed: CommittedSave, marker: CommitMarker, examination: Examination) -> None:
    size_bytes = sum(manifest.size_bytes for manifest in examination.manifests)
    file_count = sum(len(manifest.files) for manifest in examination.manifests)
    if (marker.size_bytes, marker.file_count) != (size_bytes, file_count):
        what = (
            f"says {marker.file_count} files and {marker.size_bytes} bytes, "
            f"the rank manifests {file_count} and {size_bytes}"
        )
        examination.add(committed.key, what)


def _what(key: str, error: MooringError) -> str:
    """Return what is wrong with an object, by the error of reading it."""
    return "is missing" if error.kind is ErrorKind.NOT_FOUND else str(error).removeprefix(f"{key} ")

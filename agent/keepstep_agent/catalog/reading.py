"""Examines a committed save: whether its marker, its manifests and the listing agree.

Owns every check that needs no file's bytes. Invariants: what `load` returns is complete by its own account (every rank,
every file, every size) and safe to put on a disk (no path leaves the checkpoint); every problem names its object.
"""

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Final

from keepstep_agent.adapters.checksum import crc64nvme
from keepstep_agent.adapters.control_group import memory_limit_bytes
from keepstep_agent.catalog.markers import read_marker
from keepstep_agent.catalog.object_reads import DAMAGE, at_once, for_each, problem_of, read_object
from keepstep_agent.core.errors import StoreError, checkpoint_corrupt
from keepstep_agent.core.file_lists import Columns, paths_of
from keepstep_agent.core.mirror.output_scan import folders_above
from keepstep_agent.core.model import CommitMarker, FileEntry, ManifestReference, RankManifest
from keepstep_agent.core.policies.restore_choice import CommittedSave
from keepstep_agent.core.stored.manifest import decode_manifest, shortage
from keepstep_agent.core.stored.object_layout import (
    file_key,
    manifest_key,
    manifests_prefix,
    marker_key,
    object_key,
    pack_key,
    parse_manifest_key,
    save_prefix,
)
from keepstep_agent.core.stored.packs_and_parts import LARGEST_PACK_BYTES
from keepstep_agent.ports import ObjectInfo, StoreReader

_MANIFESTS_AT_ONCE: Final = 8
_TOGETHER_BYTES: Final = 4 * 1024**2
"""The most bytes of manifests that are read at a time, unless one alone has more."""
_LEAST_ENTRY_BYTES: Final = 40
"""The minimum size of a file's entry in a manifest."""
_OTHER_OBJECTS: Final = 1_000
"""How many objects a save's folder may have beyond twice its files and ranks: a restarted agent may pack anew."""
_LISTINGS_AT_ONCE: Final = 8
_PROBLEMS: Final = 1_000
"""How many problems are kept. The rest are only counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What is wrong with one object of a checkpoint."""

    key: str
    what: str

    def __str__(self) -> str:
        return f"{self.key} {self.what}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """A file of a checkpoint and the object that holds it: its own, or its pack, perhaps of an earlier snapshot.

    `version` is the listing's. Reads of a part insist on it; a pack is read whole, and judged by its files' checksums
    alone. `object_bytes` is the object's size.
    """

    entry: FileEntry
    key: str
    version: str
    object_bytes: int


_Row = tuple[Sequence[FileEntry], int, ObjectInfo]
"""A list of files, the position of one in it, and the object that holds it."""


class StoredFiles(Columns[StoredFile]):
    """Files of manifests and the objects that hold them, sorted by path. Each is made when it is asked for."""

    __slots__ = ("_entries", "_objects", "_positions")

    def __init__(self, rows: Iterable[_Row]) -> None:
        self._entries: list[Sequence[FileEntry]] = []
        self._positions = array("I")
        self._objects: list[ObjectInfo] = []
        for entries, position, listed in rows:
            self._entries.append(entries)
            self._positions.append(position)
            self._objects.append(listed)

    def __len__(self) -> int:
        return len(self._objects)

    def _item(self, position: int) -> StoredFile:
        entry, listed = self._entries[position][self._positions[position]], self._objects[position]
        return StoredFile(entry=entry, key=listed.key, version=listed.version, object_bytes=listed.size_bytes)

    def only(self, keeps: Callable[[str], bool]) -> "StoredFiles":
        """Return those of the files whose paths `keeps` says."""
        rows = zip(self._entries, self._positions, self._objects, strict=True)
        return StoredFiles(row for row, path in zip(rows, self.paths(), strict=True) if keeps(path))

    def paths(self) -> Iterator[str]:
        """Yield the paths of all files, without the files."""
        return map(self._path, range(len(self)))

    def position(self, path: str) -> int | None:
        """Return where the file of that path is; None if there is none."""
        position = bisect_left(range(len(self)), path, key=self._path)
        return position if position < len(self) and self._path(position) == path else None

    def _path(self, position: int) -> str:
        return paths_of(self._entries[position])[self._positions[position]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedCheckpoint:
    """A checkpoint whose marker, manifests and listing agree. `files` and `links` have each path once, sorted.

    On a disk the checkpoint is a folder of these files, or with `single_file` that file itself. If only the weights are
    left, `manifests` name more. Only snapshots have `links`, which are symbolic and have no object.
    """

    committed: CommittedSave
    marker: CommitMarker
    manifests: tuple[RankManifest, ...]
    files: StoredFiles
    links: tuple[FileEntry, ...] = ()

    @property
    def size_bytes(self) -> int:
        """Bytes on a local disk."""
        return sum(file.entry.size_bytes for file in self.files)

    @property
    def single_file(self) -> bool:
        """Whether all ranks that contributed something announced this one file. Ranks with own files make a folder."""
        if len(self.files) != 1:
            return False
        contributions = [one for one in self.manifests if one.files]
        # Other files may have been dropped.
        return len({one.files[0].path for one in contributions}) == 1 and all(one.single_file for one in contributions)


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
    # By paths in UTF-8: as text, one wide character makes four bytes of each.
    files: dict[bytes, _Row] = field(default_factory=dict)
    links: dict[str, FileEntry] = field(default_factory=dict)
    more_problems: int = 0

    def add(self, key: str, what: str) -> None:
        if len(self.problems) < _PROBLEMS:
            self.problems.append(Problem(key=key, what=what))
        else:
            self.more_problems += 1


async def load(store: StoreReader, committed: CommittedSave) -> CommittedCheckpoint:
    """Return the checkpoint, checked as far as is possible without its files' bytes.

    Raises StoreError(CHECKPOINT_CORRUPT) if a check fails, and StoreError(MEMORY_SHORT) if its manifests do not
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
    """Compare marker, manifests and listing, and collect every problem. Raises only what the store raises.

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
        examination.add(committed.key, problem_of(committed.key, error))
        return examination
    if not _has_room(marker, examination):
        return examination
    objects = await _objects(store, marker, examination)
    if not examination.problems:
        await _examine_manifests(store, marker, objects, examination)
        await _add_shared(store, examination.manifests, objects)
    if not _has_room(marker, examination, largest_pack_bytes=_largest_pack_bytes(examination.manifests, objects)):
        return examination
    for manifest in examination.manifests:
        _examine_files(manifest, marker, objects, examination)
    _examine_paths(marker, examination)
    if not examination.problems:
        _examine_totals(committed, marker, examination)
    if not examination.problems:
        examination.checkpoint = CommittedCheckpoint(
            committed=committed,
            marker=marker,
            manifests=tuple(examination.manifests),
            files=StoredFiles(examination.files[path] for path in sorted(examination.files)),
            links=tuple(link for _, link in sorted(examination.links.items())),
        )
    return examination


def _has_room(marker: CommitMarker, examination: Examination, *, largest_pack_bytes: int = 0) -> bool:
    """Return whether what the marker names fits into memory. If not, note a shortage.

    A file count that cannot be true is noted as a problem.
    """
    sizes = [reference.size_bytes for reference in marker.manifests]
    if marker.file_count * _LEAST_ENTRY_BYTES > sum(sizes):
        what = f"names {marker.file_count} files, more than manifests of {sum(sizes)} bytes can list"
        examination.add(marker_key(marker.info), what)
        return False
    examination.shortage = shortage(
        f"{marker.info.name} (save {marker.info.save})",
        memory_limit_bytes(),
        files=marker.file_count,
        manifests_bytes=sizes,
        largest_pack_bytes=largest_pack_bytes,
    )
    if examination.shortage is None:
        return True
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
        for rank in await _read_manifest(store, marker, reference, objects, examination):
            files += len(rank.files)
            examination.manifests.append(rank)

    sizes = [reference.size_bytes for reference in marker.manifests]
    together = at_once(sizes, most=_MANIFESTS_AT_ONCE, together_bytes=_TOGETHER_BYTES)
    await for_each(marker.manifests, read, at_once=together)
    examination.manifests.sort(key=lambda manifest: manifest.rank)
    if files > marker.file_count:
        what = f"names {marker.file_count} files, the manifests at least {files}"
        examination.add(marker_key(marker.info), what)
        examination.manifests.clear()
    elif not examination.problems and [one.rank for one in examination.manifests] != list(
        range(marker.info.world_size)
    ):
        examination.add(marker_key(marker.info), "names manifests that do not have every rank once")
    for key in sorted(objects):
        if key.startswith(manifests_prefix(marker.info)) and parse_manifest_key(marker.info, key) is None:
            examination.add(key, f"is no manifest of a save of {marker.info.world_size} ranks")


async def _add_shared(store: StoreReader, manifests: Iterable[RankManifest], objects: dict[str, ObjectInfo]) -> None:
    """Add the objects of other saves that the manifests name, as far as they are there, and no others."""
    shared = {
        object_key(manifest.info, manifest.rank, file)
        for manifest in manifests
        for file in manifest.files
        if file.owner
    }
    by_owner = groupby(sorted(shared - objects.keys()), key=_folder_of)

    async def add(owner: tuple[str, set[str]]) -> None:
        folder, missing = owner
        # The folder may hold many objects that this save does not need.
        async for one in store.list(min(missing) if len(missing) == 1 else folder):
            if one.key in missing:
                objects[one.key] = one
                missing.remove(one.key)
                if not missing:
                    return

    await for_each(((folder, set(keys)) for folder, keys in by_owner), add, at_once=_LISTINGS_AT_ONCE)


def _folder_of(key: str) -> str:
    """Return the prefix of the save that an object belongs to."""
    name, save, _ = key.split("/", 2)
    return f"{name}/{save}/"


def _largest_pack_bytes(manifests: Iterable[RankManifest], objects: dict[str, ObjectInfo]) -> int:
    """Return the size of the largest pack that is to be read. One that is larger than any may be is not read."""
    sizes = [0]
    for manifest in manifests:
        sizes += manifest.pack_sizes_bytes
        for file in manifest.files:
            if file.owner and file.place:
                listed = objects.get(object_key(manifest.info, manifest.rank, file))
                sizes.append(listed.size_bytes if listed else 0)
    return max(size_bytes for size_bytes in sizes if size_bytes <= LARGEST_PACK_BYTES)


async def _read_manifest(
    store: StoreReader,
    marker: CommitMarker,
    reference: ManifestReference,
    objects: dict[str, ObjectInfo],
    examination: Examination,
) -> tuple[RankManifest, ...]:
    """Return a manifest's ranks if it is as the marker says; otherwise add a problem and return none."""
    key = manifest_key(marker.info, reference.first_rank, reference.rank_count)
    if _listed(key, reference.size_bytes, objects, examination, says="the marker") is None:
        return ()

    def decode(body: bytes, key: str) -> tuple[RankManifest, ...]:
        if crc64nvme(body) != reference.checksum:
            raise checkpoint_corrupt(f"{key} does not have the checksum that the marker says")
        ranks = decode_manifest(body, key)
        first = ranks[0]
        if (first.info, first.rank, len(ranks)) != (marker.info, reference.first_rank, reference.rank_count):
            raise checkpoint_corrupt(f"{key} is the manifest of another save or of other ranks")
        return ranks

    try:
        return await read_object(store, key, decode, limit_bytes=reference.size_bytes)
    except StoreError as error:
        if error.kind not in DAMAGE:
            raise
        examination.add(key, problem_of(key, error))
        return ()


def _examine_files(
    manifest: RankManifest, marker: CommitMarker, objects: dict[str, ObjectInfo], examination: Examination
) -> None:
    info = manifest.info
    packs = {
        (key := pack_key(info, manifest.rank, number)): _listed(key, size_bytes, objects, examination)
        for number, size_bytes in enumerate(manifest.pack_sizes_bytes)
    }
    for position, entry in enumerate(manifest.files):
        if marker.has_dropped(entry):
            continue
        if entry.link:
            row = examination.files.get(entry.path.encode())
            known = row[0][row[1]] if row else examination.links.setdefault(entry.path, entry)
        else:
            key = object_key(info, manifest.rank, entry)
            if not entry.place:
                listed = _listed(key, entry.size_bytes, objects, examination)
            else:
                if key not in packs:
                    packs[key] = _listed_pack(key, objects, examination)
                listed = packs[key]
            if listed is None:
                continue
            if entry.place and entry.place.offset_bytes + entry.size_bytes > listed.size_bytes:
                examination.add(key, f"has {listed.size_bytes} bytes, and {entry.path} does not lie in these")
                continue
            link = examination.links.get(entry.path)
            if link is not None:
                known = link
            else:
                row = (manifest.files, position, listed)
                entries, at, _ = examination.files.setdefault(entry.path.encode(), row)
                known = entries[at]
        if not known.has_bytes_of(entry):
            examination.add(file_key(info, entry.path), "has different bytes on two ranks")


def _listed(
    key: str,
    size_bytes: int,
    objects: dict[str, ObjectInfo],
    examination: Examination,
    *,
    says: str = "its manifest",
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


def _listed_pack(key: str, objects: dict[str, ObjectInfo], examination: Examination) -> ObjectInfo | None:
    """Return the listed pack of another save, whose size no manifest here says; otherwise add a problem."""
    listed = objects.get(key)
    if listed is None:
        examination.add(key, "is missing")
        return None
    if listed.size_bytes > LARGEST_PACK_BYTES:
        examination.add(key, f"has {listed.size_bytes} bytes, more than the {LARGEST_PACK_BYTES} of a pack")
        return None
    return listed


def _examine_paths(marker: CommitMarker, examination: Examination) -> None:
    """Add a problem for what lies below a file or a link: a bucket allows that, a disk does not."""
    for paths in (map(bytes.decode, examination.files), examination.links):
        for path in paths:
            for folder in folders_above(path):
                if folder in examination.links or folder.encode() in examination.files:
                    what = "link" if folder in examination.links else "file"
                    examination.add(file_key(marker.info, path), f"lies below the {what} {folder}")


def _examine_totals(committed: CommittedSave, marker: CommitMarker, examination: Examination) -> None:
    size_bytes = sum(manifest.size_bytes for manifest in examination.manifests)
    file_count = sum(len(manifest.files) for manifest in examination.manifests)
    if (marker.size_bytes, marker.file_count) != (size_bytes, file_count):
        says = f"says {marker.file_count} files and {marker.size_bytes} bytes"
        examination.add(committed.key, f"{says}, the manifests {file_count} and {size_bytes}")

"""Lists of files whose values are kept in columns: a checkpoint may have 100,000 files.

A file as a Python object takes a kilobyte, as a row of these lists less than a hundred bytes and its path. The lists
are sequences, and make the object of a file when it is asked for. They do not change.
"""

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Annotated, Final, TypeVar, overload

from msgspec import Meta

from keepstep_agent.core.limits import FILES_PER_RANK, FileBytes, PathText, Stamp
from keepstep_agent.core.model import (
    FileEntry,
    Fingerprint,
    Owner,
    PackPlace,
    PinMethod,
    SnapshotId,
    SourceFile,
    StagedFile,
)

_Item = TypeVar("_Item")

_NONE: Final = -1
_NO_TIME: Final = -(2**63)
_NO_GROUP: Final = -(2**63)
_STAGED: Final = {"sizes_bytes": "Q", "mtimes_ns": "q", "inodes": "Q", "private": "B", "changed_ns": "q"}
"""The columns of numbers of `StagedFiles`, with their types."""


class Columns(Sequence[_Item]):
    """A sequence that makes its items from columns."""

    __slots__ = ()

    def _item(self, position: int) -> _Item:
        raise NotImplementedError

    @overload
    def __getitem__(self, position: int) -> _Item: ...
    @overload
    def __getitem__(self, position: slice) -> Sequence[_Item]: ...
    def __getitem__(self, position: int | slice) -> _Item | Sequence[_Item]:
        if isinstance(position, slice):
            return [self._item(number) for number in range(*position.indices(len(self)))]
        return self._item(range(len(self))[position])

    def __iter__(self) -> Iterator[_Item]:
        return map(self._item, range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(mine == theirs for mine, theirs in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]


class PathList(Columns[str]):
    """Paths, as UTF-8 in one piece of memory. Each begins with `prefix`, which is kept once."""

    __slots__ = ("_ends", "_text", "prefix")

    def __init__(self, paths: Iterable[str] = (), prefix: str = "") -> None:
        text, ends = bytearray(), array("I")
        for path in paths:
            text += path.encode()
            ends.append(len(text))
        self._text, self._ends, self.prefix = bytes(text), ends, prefix

    @classmethod
    def encoded(cls, paths: Sequence[bytes]) -> "PathList":
        """Return these paths, which are UTF-8."""
        found = cls()
        found._text, found._ends = b"".join(paths), array("I", accumulate(map(len, paths)))
        return found

    def __len__(self) -> int:
        return len(self._ends)

    def _item(self, position: int) -> str:
        begin = self._ends[position - 1] if position else 0
        return self.prefix + self._text[begin : self._ends[position]].decode()

    def below(self, folder: str) -> "PathList":
        """Return the same paths below a folder; empty: as they are."""
        paths = PathList(prefix=f"{folder}/{self.prefix}" if folder else self.prefix)
        paths._text, paths._ends = self._text, self._ends
        return paths

    def position(self, path: str) -> int | None:
        """Return where a path is, if the paths are sorted; None if it is not among them."""
        position = bisect_left(self, path)
        return position if position < len(self) and self._item(position) == path else None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StagedFiles(Columns[StagedFile]):
    """The pinned files of a rank, sorted by path. The pins lie in `folder`, which is below the volume.

    `private` has 1 for each file whose inode is ours alone, and 0 for the others. `announced` is the path of the file
    that was announced itself; empty if a directory was. The other columns are as in `StagedFile`. Raises ValueError if
    the columns do not fit together, or a path comes twice.
    """

    folder: str
    paths: Annotated[Sequence[PathText], Meta(max_length=FILES_PER_RANK)]
    sizes_bytes: Sequence[FileBytes]
    mtimes_ns: Sequence[Stamp]
    inodes: Sequence[int]
    private: Sequence[Annotated[int, Meta(ge=0, le=1)]]
    changed_ns: Sequence[Stamp]
    announced: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.paths, PathList):
            object.__setattr__(self, "paths", PathList(self.paths))
        for name, kind in _STAGED.items():
            column = getattr(self, name)
            if len(column) != len(self.paths):
                raise ValueError(f"{len(column)} {name} of {len(self.paths)} files")
            try:
                object.__setattr__(self, name, array(kind, column))
            except OverflowError as error:
                raise ValueError(f"{name}: {error}") from error
        if any(path >= following for path, following in pairwise(self.paths)):
            raise ValueError("the paths are not sorted, or one comes twice")

    def __len__(self) -> int:
        return len(self.paths)

    def _item(self, position: int) -> StagedFile:
        path = self.paths[position]
        return StagedFile(
            path=path,
            pin=f"{self.folder}/{path}",
            fingerprint=Fingerprint(
                size_bytes=self.sizes_bytes[position],
                mtime_ns=self.mtimes_ns[position],
                inode=self.inodes[position],
            ),
            private=bool(self.private[position]),
            announced=path == self.announced,
            changed_ns=self.changed_ns[position],
        )

    def position(self, path: str) -> int | None:
        """Return where the file of that path is; None if there is none."""
        assert isinstance(self.paths, PathList)
        return self.paths.position(path)

    def linked_inodes(self) -> Iterator[int]:
        """Yield the inodes that the files share with the trainer's; one of a file with two names comes twice."""
        return (inode for inode, private in zip(self.inodes, self.private, strict=True) if not private)


class Selected(Columns[_Item]):
    """Some items of a list, by their positions in it."""

    __slots__ = ("_items", "positions")

    def __init__(self, items: Sequence[_Item], positions: Sequence[int]) -> None:
        self._items = items
        self.positions = array("I", positions)

    def __len__(self) -> int:
        return len(self.positions)

    def _item(self, position: int) -> _Item:
        return self._items[self.positions[position]]


def staged_files(files: Iterable[StagedFile]) -> StagedFiles:
    """Return the list of pinned files, whose pins lie in one folder. Raises ValueError if a path comes twice."""
    folder, announced, last, is_sorted = "", "", "", True
    columns = {name: array(kind) for name, kind in _STAGED.items()}

    def paths() -> Iterator[str]:
        nonlocal folder, announced, last, is_sorted
        for file in files:
            columns["sizes_bytes"].append(file.fingerprint.size_bytes)
            columns["mtimes_ns"].append(file.fingerprint.mtime_ns)
            columns["inodes"].append(file.fingerprint.inode)
            columns["private"].append(file.private)
            columns["changed_ns"].append(file.changed_ns)
            folder = file.pin.removesuffix(f"/{file.path}")
            announced = file.path if file.announced else announced
            is_sorted, last = is_sorted and last < file.path, file.path
            yield file.path

    found = PathList(paths())
    if not is_sorted:
        order = sorted(range(len(found)), key=found.__getitem__)
        found = PathList(map(found.__getitem__, order))
        columns = {name: array(kind, map(columns[name].__getitem__, order)) for name, kind in _STAGED.items()}
    return StagedFiles(folder=folder, paths=found, announced=announced, **columns)


class FileEntries(Columns[FileEntry]):
    """The files of a manifest, in the order given."""

    __slots__ = (
        "_checksum_ends",
        "_checksums",
        "_links",
        "_modified_ns",
        "_offsets_bytes",
        "_owner_numbers",
        "_owner_paths",
        "_owners",
        "_packs",
        "_part_sizes_bytes",
        "_sizes_bytes",
        "owners",
        "paths",
    )

    def __init__(self, entries: Iterable[FileEntry] = ()) -> None:
        self._sizes_bytes, self._part_sizes_bytes = array("Q"), array("Q")
        self._checksums, self._checksum_ends = array("Q"), array("Q")
        self._packs, self._offsets_bytes = array("i"), array("Q")
        self._owner_numbers, self._modified_ns = array("i"), array("q")
        # Each save that stores bytes of these files, with its number; where a file has another path there; the targets
        # of links.
        self._owners: dict[tuple[str, str, int], int] = {}
        self._owner_paths: dict[int, str] = {}
        self._links: dict[int, str] = {}
        self.paths = PathList(map(self._add, entries))
        self.owners = tuple(self._owners)

    def _add(self, entry: FileEntry) -> str:
        position, owner, number = len(self), entry.owner, _NONE
        if owner is not None:
            number = self._owners.setdefault((owner.name, owner.save, owner.rank), len(self._owners))
            if owner.path != entry.path:
                self._owner_paths[position] = owner.path
        if entry.link:
            self._links[position] = entry.link
        self._owner_numbers.append(number)
        self._modified_ns.append(_NO_TIME if entry.modified_ns is None else entry.modified_ns)
        self._packs.append(entry.place.number if entry.place else _NONE)
        self._offsets_bytes.append(entry.place.offset_bytes if entry.place else 0)
        self._checksums.extend(entry.checksums)
        self._checksum_ends.append(len(self._checksums))
        self._part_sizes_bytes.append(entry.part_size_bytes)
        self._sizes_bytes.append(entry.size_bytes)
        return entry.path

    def __len__(self) -> int:
        return len(self._sizes_bytes)

    def _item(self, position: int) -> FileEntry:
        path, pack, modified_ns = self.paths[position], self._packs[position], self._modified_ns[position]
        begin = self._checksum_ends[position - 1] if position else 0
        owner = None
        if self._owner_numbers[position] != _NONE:
            name, save, rank = self.owners[self._owner_numbers[position]]
            owner = Owner(name=name, save=save, rank=rank, path=self._owner_paths.get(position, path))
        return FileEntry(
            path=path,
            size_bytes=self._sizes_bytes[position],
            part_size_bytes=self._part_sizes_bytes[position],
            checksums=self._checksums[begin : self._checksum_ends[position]],
            place=None if pack == _NONE else PackPlace(number=pack, offset_bytes=self._offsets_bytes[position]),
            owner=owner,
            modified_ns=None if modified_ns == _NO_TIME else modified_ns,
            link=self._links.get(position, ""),
        )


class SourceFiles(Columns[SourceFile]):
    """The files that a snapshot sends, in the order given. Their fingerprints are those of the mirror's looks."""

    __slots__ = ("_fingerprints", "_groups", "_methods", "paths")

    def __init__(self, files: Iterable[SourceFile] = ()) -> None:
        self._fingerprints: list[Fingerprint] = []
        self._methods: list[PinMethod] = []
        self._groups = array("q")
        self.paths = PathList(map(self._add, files))

    def _add(self, file: SourceFile) -> str:
        self._fingerprints.append(file.fingerprint)
        self._methods.append(file.method)
        self._groups.append(_NO_GROUP if file.group is None else file.group)
        return file.path

    def __len__(self) -> int:
        return len(self._fingerprints)

    def _item(self, position: int) -> SourceFile:
        group = self._groups[position]
        return SourceFile(
            path=self.paths[position],
            fingerprint=self._fingerprints[position],
            method=self._methods[position],
            group=None if group == _NO_GROUP else group,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotContent:
    """What a snapshot consists of: `files` to send, and `kept`, of which nothing is sent.

    Kept are files that are stored already, with their owners, and symbolic links. `instead` are stored versions of
    files to send, and of files that the program has deleted: they are kept if a file cannot be pinned as it was. `base`
    is the committed snapshot that names these files too; None if there is none.
    """

    base: SnapshotId | None
    kept: Sequence[FileEntry]
    files: Sequence[SourceFile]
    instead: Sequence[FileEntry] = ()

    def __post_init__(self) -> None:
        for name in ("kept", "instead"):
            entries = getattr(self, name)
            if not isinstance(entries, FileEntries):
                object.__setattr__(self, name, FileEntries(entries))
        if not isinstance(self.files, SourceFiles):
            object.__setattr__(self, "files", SourceFiles(self.files))


def paths_of(files: Sequence[FileEntry]) -> Sequence[str]:
    """Return the paths of a manifest's files, without an entry of each."""
    return files.paths if isinstance(files, FileEntries) else [file.path for file in files]


def by_path(files: Sequence[FileEntry]) -> Iterator[FileEntry]:
    """Yield a manifest's files in the order of their paths."""
    return map(files.__getitem__, sorted(range(len(files)), key=paths_of(files).__getitem__))

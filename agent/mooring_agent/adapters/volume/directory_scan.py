"""The watched directory as values for `core.directory_rules`: names, sizes, times, what each format says of its end.

Reads little of each file, once per content. Invariants: what vanishes meanwhile is simply not in the snapshot, which
then differs from the last one; no link is followed out of a candidate, and a link is never a candidate itself.
"""

import errno
import json
import os
import re
import stat
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Final

from mooring_agent.adapters.volume.shared_volume import Folder, open_volume
from mooring_agent.adapters.volume.source_walk import resolve_source
from mooring_agent.core.directory_rules import candidate
from mooring_agent.core.directory_snapshot import DirectorySnapshot, FileSnapshot, Proof
from mooring_agent.core.errors import ErrorKind, MooringError

_ZIP_SUFFIXES: Final = (".pt", ".pth", ".ckpt", ".bin", ".pkl")
_ZIP_START: Final = b"PK\x03\x04"
_JSON_LIMIT_BYTES: Final = 256 * 1024 * 1024
_HEADER_LIMIT_BYTES: Final = 100_000_000
_READ_BYTES: Final = 1024 * 1024

# In a pickle, which is not ours to load: the names of files stand in it as they are.
_DCP_FILE: Final = re.compile(rb"__\d+_\d+\.distcp")
_DCP_METADATA: Final = ".metadata"
_DCP_NAME_BYTES: Final = 64
"""Longer than any of them."""

_Key = tuple[str, int, int, int]
_Said = tuple[Proof, frozenset[str]]


class DirectoryScanner:
    """Takes snapshots of one directory; remembers what files said that did not change since the last scan."""

    def __init__(self, volume: Path, directory: Path) -> None:
        """`directory` is below `volume`."""
        self._volume = volume
        self._directory = directory
        self._said: dict[_Key, _Said] = {}

    def scan(self, seen_at: float) -> list[DirectorySnapshot]:
        """Every candidate, by name; none if the directory is not there. Blocks. Raises OSError if it is unreadable."""
        known: dict[_Key, _Said] = {}
        snapshots: list[DirectorySnapshot] = []
        with suppress(FileNotFoundError, NotADirectoryError), self._open() as directory:
            for entry in directory.entries():
                snapshot = self._look(directory, entry.name, seen_at, known)
                if snapshot:
                    snapshots.append(snapshot)
        self._said = known
        return snapshots

    def look(self, name: str) -> DirectorySnapshot | None:
        """One entry, if it is a candidate; `seen_at` is 0."""
        with suppress(OSError), self._open() as directory:
            return self._look(directory, name, 0.0, {})
        return None

    def _open(self) -> Folder:
        try:
            found = resolve_source(self._volume, str(self._directory))
        except MooringError as error:
            number = errno.ENOENT if error.kind is ErrorKind.FILE_MISSING else errno.EXDEV
            raise OSError(number, str(error)) from error
        with open_volume(self._volume) as root:
            return root.folder(found)

    def _look(self, directory: Folder, name: str, seen_at: float, known: dict[_Key, _Said]) -> DirectorySnapshot | None:
        try:
            status = directory.status(name)
        except OSError:
            return None
        is_folder = stat.S_ISDIR(status.st_mode)
        if not (is_folder or stat.S_ISREG(status.st_mode)) or not candidate(name, single_file=not is_folder):
            return None
        folders: list[str] = []
        files: tuple[FileSnapshot, ...] = ()
        if is_folder:
            files = tuple(self._files(directory, name, folders, known))
        else:
            with suppress(OSError):
                file = self._file(directory, status, name, name, known)
                files = (file,) if file else ()
        return DirectorySnapshot(
            name=name, single_file=not is_folder, files=files, folders=tuple(folders), seen_at=seen_at
        )

    def _files(
        self, directory: Folder, name: str, folders: list[str], known: dict[_Key, _Said]
    ) -> Iterator[FileSnapshot]:
        """The files below the folder `name`; adds to `folders` and `known`."""
        try:
            root = directory.folder(name)
        except OSError:
            return
        with root:
            # Gone, or not ours to read: in that case staging says so.
            for prefix, folder, entries in root.walk(lambda path, error: None):
                for entry in entries:
                    path = prefix + entry.name
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(path)
                        continue
                    # Gone, or not ours to read, as above.
                    with suppress(OSError):
                        status = entry.stat(follow_symlinks=False)
                        file = self._file(folder, status, f"{name}/{path}", path, known)
                        if file:
                            yield file

    def _file(
        self, folder: Folder, status: os.stat_result, whole_path: str, path: str, known: dict[_Key, _Said]
    ) -> FileSnapshot | None:
        """`whole_path` is below the directory, `path` below the candidate. Raises OSError."""
        if not stat.S_ISREG(status.st_mode):
            return None
        key = (whole_path, status.st_size, status.st_mtime_ns, status.st_ino)
        said = self._said.get(key)
        if said is None:
            name = path.rpartition("/")[2]
            with os.fdopen(folder.open_file(name), "rb") as file:
                said = _prove(file, name, status.st_size), _names(file, name)
        known[key] = said
        proof, names = said
        return FileSnapshot(
            path=path,
            size_bytes=status.st_size,
            mtime_ns=status.st_mtime_ns,
            inode=status.st_ino,
            proof=proof,
            names=names,
        )


def _names(file: BinaryIO, name: str) -> frozenset[str]:
    """The files that DCP's metadata names; OSError if it cannot be read."""
    if name != _DCP_METADATA:
        return frozenset()
    found: set[bytes] = set()
    file.seek(0)
    rest = b""
    # It may be larger than we are.
    while read := file.read(_READ_BYTES):
        text = rest + read
        found.update(_DCP_FILE.findall(text))
        rest = text[-_DCP_NAME_BYTES:]
    return frozenset(name.decode() for name in found)


def _prove(file: BinaryIO, name: str, size_bytes: int) -> Proof:
    """What the file's format says; OSError if it cannot be read."""
    try:
        return _prove_format(file, name, size_bytes)
    except OSError:
        raise
    # Half-written bytes can trip a parser anywhere, and no file may blind the watch to the others.
    except Exception:
        return Proof.BROKEN


def _prove_format(file: BinaryIO, name: str, size_bytes: int) -> Proof:
    if name.endswith(".safetensors"):
        return _prove_safetensors(file, size_bytes)
    if name.endswith(_ZIP_SUFFIXES):
        return _prove_zip(file, size_bytes)
    if name == "trainer_state.json":
        return _prove_json(file, size_bytes)
    return Proof.NONE


def _prove_zip(file: BinaryIO, size_bytes: int) -> Proof:
    """torch.save writes a zip, whose directory is its end; an older pickle says nothing of its end."""
    if size_bytes == 0:
        return Proof.BROKEN
    if file.read(len(_ZIP_START)) != _ZIP_START:
        return Proof.NONE
    with zipfile.ZipFile(file):
        return Proof.WHOLE


def _prove_safetensors(file: BinaryIO, size_bytes: int) -> Proof:
    start = file.read(8)
    if len(start) < 8:
        return Proof.BROKEN
    header_bytes = int.from_bytes(start, "little")
    if header_bytes > min(_HEADER_LIMIT_BYTES, size_bytes):
        return Proof.BROKEN
    header = json.loads(file.read(header_bytes))
    ends = [int(entry["data_offsets"][1]) for name, entry in header.items() if name != "__metadata__"]
    return Proof.WHOLE if size_bytes == 8 + header_bytes + max(ends, default=0) else Proof.BROKEN


def _prove_json(file: BinaryIO, size_bytes: int) -> Proof:
    if size_bytes > _JSON_LIMIT_BYTES:
        return Proof.NONE
    json.loads(file.read())
    return Proof.WHOLE

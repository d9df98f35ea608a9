"""Scans the watched directory for `core.watch.directory_rules`: names, sizes, times, which files are provably whole.

Reads little of each file, once per content. Invariants: a file that vanishes during the scan is not in the snapshot,
which then differs from the last one; no link is followed out of a candidate, and a link is never a candidate.
"""

import errno
import os
import re
import stat
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from mooring_agent.adapters.volume.announced_files import resolve_path
from mooring_agent.adapters.volume.shared_volume import Folder, open_volume
from mooring_agent.core.errors import ErrorKind, MooringError
from mooring_agent.core.limits import SAFETENSORS_HEADER_BYTES, TRAINER_STATE_BYTES
from mooring_agent.core.watch.checkpoint_layouts import DirectorySnapshot, FileSnapshot, Proof
from mooring_agent.core.watch.directory_rules import candidate

_ZIP_SUFFIXES: Final = (".pt", ".pth", ".ckpt", ".bin", ".pkl")
_ZIP_START: Final = b"PK\x03\x04"
_ZIP_ENTRY: Final = b"PK\x01\x02"
# Signature, eight bytes that are skipped, size and offset of the list of members, length of the comment at the end.
_ZIP_END: Final = struct.Struct("<4s8xLLH")
_ZIP_END_SIGNATURE: Final = b"PK\x05\x06"
_ZIP_COMMENT_BYTES: Final = 65_535
# In large files. The locator: signature, offset of the end record. The end record: signature, size and offset of the
# list of members.
_ZIP64_LOCATOR: Final = struct.Struct("<4s4xQ4x")
_ZIP64_LOCATOR_SIGNATURE: Final = b"PK\x06\x07"
_ZIP64_END: Final = struct.Struct("<4s36xQQ")
_ZIP64_END_SIGNATURE: Final = b"PK\x06\x06"
_READ_BYTES: Final = 1024 * 1024

# DCP's metadata is a pickle, which must not be loaded. The names of files stand in it as plain text.
_DCP_FILE: Final = re.compile(rb"__\d+_\d+\.distcp")
_DCP_METADATA: Final = ".metadata"
_DCP_NAME_BYTES: Final = 64
"""Longer than any such name."""
_TENSOR_END: Final = re.compile(rb'"data_offsets"\s*:\s*\[\s*\d{1,19}\s*,\s*(\d{1,19})\s*\]')
_TENSOR_END_BYTES: Final = 256
"""Longer than any text that the pattern matches, with the spaces that writers of the format use."""

_Key = tuple[str, int, int, int]
_Said = tuple[Proof, frozenset[str]]


class DirectoryScanner:
    """Takes snapshots of one directory. Reads a file again only if it changed since the last scan."""

    def __init__(self, volume: Path, directory: Path) -> None:
        """`directory` is below `volume`."""
        self._volume = volume
        self._directory = directory
        self._said: dict[_Key, _Said] = {}

    def scan(self, seen_at: float) -> list[DirectorySnapshot]:
        """Return every candidate, sorted by name; none if the directory is missing. Blocks.

        Raises OSError if the directory is unreadable.
        """
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
        """Return the snapshot of one entry, with `seen_at` 0; None if it is no candidate or cannot be read."""
        with suppress(OSError), self._open() as directory:
            return self._look(directory, name, 0.0, {})
        return None

    def _open(self) -> Folder:
        try:
            found = resolve_path(self._volume, str(self._directory))
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
        """Yield the files below the folder `name`, and add to `folders` and `known`."""
        try:
            root = directory.folder(name)
        except OSError:
            return
        with root:
            # A folder may be gone, or unreadable to the agent: staging reports that.
            for prefix, folder, entries in root.walk(lambda path, error: None):
                for entry in entries:
                    path = prefix + entry.name
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(path)
                        continue
                    # The same holds for a file.
                    with suppress(OSError):
                        status = entry.stat(follow_symlinks=False)
                        file = self._file(folder, status, f"{name}/{path}", path, known)
                        if file:
                            yield file

    def _file(
        self, folder: Folder, status: os.stat_result, whole_path: str, path: str, known: dict[_Key, _Said]
    ) -> FileSnapshot | None:
        """Examine a file. `whole_path` is relative to the directory, `path` to the candidate. Raises OSError."""
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
    """Return the files that DCP's metadata names. Raises OSError if it cannot be read."""
    if name != _DCP_METADATA:
        return frozenset()
    found: set[bytes] = set()
    file.seek(0)
    rest = b""
    # In pieces: the file may be larger than the agent's memory.
    while read := file.read(_READ_BYTES):
        text = rest + read
        found.update(_DCP_FILE.findall(text))
        rest = text[-_DCP_NAME_BYTES:]
    return frozenset(name.decode() for name in found)


def _prove(file: BinaryIO, name: str, size_bytes: int) -> Proof:
    """Return what the file's format shows. Raises OSError if the file cannot be read."""
    try:
        return _prove_format(file, name, size_bytes)
    except OSError:
        raise
    # Half-written bytes can make a parser fail anywhere, and one such file must not end the scan of the others.
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
    """Judge a file of torch.save: a zip ends with its list of members; an older pickle shows nothing."""
    if size_bytes == 0:
        return Proof.BROKEN
    if file.read(len(_ZIP_START)) != _ZIP_START:
        return Proof.NONE
    return Proof.WHOLE if _zip_ends(file, size_bytes) else Proof.BROKEN


def _zip_ends(file: BinaryIO, size_bytes: int) -> bool:
    """Whether the list of members at the end of a zip is whole.

    Reads only the start of the list, which may be larger than the agent's memory.
    """
    tail_begins = max(0, size_bytes - _ZIP_END.size - _ZIP_COMMENT_BYTES)
    file.seek(tail_begins)
    tail = file.read(size_bytes - tail_begins)
    found = tail.rfind(_ZIP_END_SIGNATURE)
    if found < 0:
        return False
    _, list_bytes, list_begins, comment_bytes = _ZIP_END.unpack_from(tail, found)
    list_ends = tail_begins + found
    if list_ends + _ZIP_END.size + comment_bytes != size_bytes:
        return False
    locator_begins = list_ends - _ZIP64_LOCATOR.size
    signature, end_begins = _ZIP64_LOCATOR.unpack(_read_at(file, locator_begins, _ZIP64_LOCATOR.size))
    if signature == _ZIP64_LOCATOR_SIGNATURE:
        signature, list_bytes, list_begins = _ZIP64_END.unpack(_read_at(file, end_begins, _ZIP64_END.size))
        if signature != _ZIP64_END_SIGNATURE:
            return False
        list_ends = end_begins
    if list_begins + list_bytes != list_ends:
        return False
    return list_bytes == 0 or _read_at(file, list_begins, len(_ZIP_ENTRY)) == _ZIP_ENTRY


def _read_at(file: BinaryIO, offset_bytes: int, count: int) -> bytes:
    file.seek(offset_bytes)
    return file.read(count)


def _prove_safetensors(file: BinaryIO, size_bytes: int) -> Proof:
    start = file.read(8)
    if len(start) < 8:
        return Proof.BROKEN
    header_bytes = int.from_bytes(start, "little")
    if header_bytes > min(SAFETENSORS_HEADER_BYTES, size_bytes):
        return Proof.BROKEN
    ends = _largest_end(file, header_bytes)
    return Proof.WHOLE if size_bytes == 8 + header_bytes + ends else Proof.BROKEN


def _largest_end(file: BinaryIO, header_bytes: int) -> int:
    """Return where the last tensor ends according to the header. Raises ValueError if it is no header.

    Searches the header instead of decoding it, because decoding takes many times its size in memory. The pattern cannot
    match inside a name or a text, where its quotes would be escaped.
    """
    largest = 0
    rest = b""
    first, last = b"", b""
    while header_bytes and (read := file.read(min(_READ_BYTES, header_bytes))):
        header_bytes -= len(read)
        first = first or read[:1]
        last = read.rstrip()[-1:] or last
        text = rest + read
        largest = max(largest, *(int(end) for end in _TENSOR_END.findall(text)), 0)
        rest = text[-_TENSOR_END_BYTES:]
    if (first, last) != (b"{", b"}"):
        raise ValueError("it is not a JSON object")
    return largest


def _prove_json(file: BinaryIO, size_bytes: int) -> Proof:
    if size_bytes > TRAINER_STATE_BYTES:
        return Proof.NONE
    # Python writes these for a loss that is not a number, but they are not JSON.
    text = file.read(size_bytes).replace(b"NaN", b"0").replace(b"Infinity", b"0")
    # Raw checks the syntax and builds no objects: the trainer may write anything.
    msgspec.json.decode(text, type=msgspec.Raw)
    return Proof.WHOLE

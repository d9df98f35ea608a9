"""The watched directory as values for `core.directory_rules`: names, sizes, times, what each format says of its end.

Reads little of each file, once per content. Invariants: what vanishes meanwhile is simply not in the snapshot, which
then differs from the last one; no link is followed out of a candidate, and a link is never a candidate itself.
"""

import json
import os
import re
import stat
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from mooring_agent.core.directory_rules import candidate
from mooring_agent.core.directory_snapshot import DirectorySnapshot, FileSnapshot, Proof

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

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._said: dict[_Key, _Said] = {}

    def scan(self, seen_at: float) -> list[DirectorySnapshot]:
        """Every candidate, by name; none if the directory is not there. Blocks. Raises OSError if it is unreadable."""
        try:
            names = sorted(path.name for path in self._directory.iterdir())
        except (FileNotFoundError, NotADirectoryError):
            names = []
        known: dict[_Key, _Said] = {}
        snapshots = [snapshot for name in names if (snapshot := self._look(name, seen_at, known))]
        self._said = known
        return snapshots

    def look(self, name: str) -> DirectorySnapshot | None:
        """One entry, if it is a candidate; `seen_at` is 0."""
        return self._look(name, 0.0, {})

    def _look(self, name: str, seen_at: float, known: dict[_Key, _Said]) -> DirectorySnapshot | None:
        root = self._directory / name
        try:
            mode = root.lstat().st_mode
        except OSError:
            return None
        is_folder = stat.S_ISDIR(mode)
        if not (is_folder or stat.S_ISREG(mode)) or not candidate(name, single_file=not is_folder):
            return None
        folders: list[str] = []
        files = tuple(self._files(root, is_folder, folders, known))
        return DirectorySnapshot(
            name=name, single_file=not is_folder, files=files, folders=tuple(folders), seen_at=seen_at
        )

    def _files(
        self, root: Path, is_folder: bool, folders: list[str], known: dict[_Key, _Said]
    ) -> Iterator[FileSnapshot]:
        """The files below `root`, or `root` itself; adds to `folders` and `known`."""
        paths = _walk(root, folders) if is_folder else iter([root.name])
        for path in paths:
            absolute = f"{root}/{path}" if is_folder else str(root)
            try:
                status = os.stat(absolute)  # noqa: PTH116 - ten thousand strings every second cost less than paths
                if not stat.S_ISREG(status.st_mode):
                    continue
                key = (absolute, status.st_size, status.st_mtime_ns, status.st_ino)
                said = self._said.get(key)
                if said is None:
                    file = Path(absolute)
                    said = _prove(file, status.st_size), _names(file)
            except OSError:
                # Gone, or not ours to read: in that case staging says so.
                continue
            known[key] = said
            proof, names = said
            yield FileSnapshot(
                path=path,
                size_bytes=status.st_size,
                mtime_ns=status.st_mtime_ns,
                inode=status.st_ino,
                proof=proof,
                names=names,
            )


def _walk(root: Path, folders: list[str]) -> Iterator[str]:
    waiting = [""]
    while waiting:
        prefix = waiting.pop()
        try:
            with os.scandir(root / prefix) as entries:
                for entry in entries:
                    name = prefix + entry.name
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(name)
                        waiting.append(f"{name}/")
                    else:
                        yield name
        except OSError:
            # As for files, above.
            continue


def _names(path: Path) -> frozenset[str]:
    """The files that DCP's metadata names; OSError if it cannot be read."""
    if path.name != _DCP_METADATA:
        return frozenset()
    found: set[bytes] = set()
    with path.open("rb") as file:
        rest = b""
        # It may be larger than we are.
        while read := file.read(_READ_BYTES):
            text = rest + read
            found.update(_DCP_FILE.findall(text))
            rest = text[-_DCP_NAME_BYTES:]
    return frozenset(name.decode() for name in found)


def _prove(path: Path, size_bytes: int) -> Proof:
    """What the file's format says; OSError if it cannot be read."""
    try:
        return _prove_format(path, size_bytes)
    except OSError:
        raise
    # Half-written bytes can trip a parser anywhere, and no file may blind the watch to the others.
    except Exception:
        return Proof.BROKEN


def _prove_format(path: Path, size_bytes: int) -> Proof:
    if path.name.endswith(".safetensors"):
        return _prove_safetensors(path, size_bytes)
    if path.name.endswith(_ZIP_SUFFIXES):
        return _prove_zip(path, size_bytes)
    if path.name == "trainer_state.json":
        return _prove_json(path, size_bytes)
    return Proof.NONE


def _prove_zip(path: Path, size_bytes: int) -> Proof:
    """torch.save writes a zip, whose directory is its end; an older pickle says nothing of its end."""
    if size_bytes == 0:
        return Proof.BROKEN
    with path.open("rb") as file:
        if file.read(len(_ZIP_START)) != _ZIP_START:
            return Proof.NONE
        with zipfile.ZipFile(file):
            return Proof.WHOLE


def _prove_safetensors(path: Path, size_bytes: int) -> Proof:
    with path.open("rb") as file:
        start = file.read(8)
        if len(start) < 8:
            return Proof.BROKEN
        header_bytes = int.from_bytes(start, "little")
        if header_bytes > min(_HEADER_LIMIT_BYTES, size_bytes):
            return Proof.BROKEN
        header = json.loads(file.read(header_bytes))
        ends = [int(entry["data_offsets"][1]) for name, entry in header.items() if name != "__metadata__"]
    return Proof.WHOLE if size_bytes == 8 + header_bytes + max(ends, default=0) else Proof.BROKEN


def _prove_json(path: Path, size_bytes: int) -> Proof:
    if size_bytes > _JSON_LIMIT_BYTES:
        return Proof.NONE
    json.loads(path.read_bytes())
    return Proof.WHOLE

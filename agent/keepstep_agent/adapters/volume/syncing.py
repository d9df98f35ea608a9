"""Makes many files and folders of the volume durable at a time."""

import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from struct import Struct
from typing import Final

from keepstep_agent.adapters.volume.shared_volume import Folder, open_volume
from keepstep_agent.core.model import Fingerprint

# A filesystem commits its journal once for all threads that wait for it, so this many wait together.
_THREADS: Final = 16
# Batches per thread. Each batch costs as much as a file, and many batches even out large and small files.
_TURNS: Final = 16
# The threads may be far ahead of who reads what they found.
_STATUS: Final = Struct("QqQq")


def folder_of(path: str) -> str:
    return path.rpartition("/")[0]


def sync_files(volume: Path, files: Sequence[str]) -> Iterator[tuple[Fingerprint, int]]:
    """Make the files durable, and yield of each its fingerprint and ctime in nanoseconds, just after its fsync.

    Paths are below the volume. All are durable when the iterator ends. Blocks. Raises OSError.
    """
    with ThreadPoolExecutor(_THREADS, "stage") as threads:
        for synced in threads.map(lambda turn: _sync_files(volume, files[turn]), _turns(len(files))):
            for size_bytes, mtime_ns, inode, changed_ns in _STATUS.iter_unpack(synced):
                yield Fingerprint(size_bytes=size_bytes, mtime_ns=mtime_ns, inode=inode), changed_ns


def sync_folders(root: Folder, folders: Iterable[str]) -> None:
    """Make the names in the folders durable. `root` is the open volume; paths are below it. Blocks. Raises OSError."""
    with ThreadPoolExecutor(_THREADS, "stage") as threads:
        for _ in threads.map(lambda path: _sync_folder(root, path), folders):
            pass


def _turns(length: int) -> Iterator[slice]:
    """Split so many paths, in order, into the batches that threads take."""
    count = max(1, -(-length // (_THREADS * _TURNS)))
    return (slice(begin, begin + count) for begin in range(0, length, count))


def _sync_files(volume: Path, paths: Sequence[str]) -> bytearray:
    found = bytearray()
    with open_volume(volume) as root:
        for above, together in groupby(paths, key=folder_of):
            with root.folder(above) as folder:
                for path in together:
                    with folder.opened_file(path.rpartition("/")[2]) as descriptor:
                        os.fsync(descriptor)
                        status = os.fstat(descriptor)
                        found += _STATUS.pack(status.st_size, status.st_mtime_ns, status.st_ino, status.st_ctime_ns)
    return found


def _sync_folder(root: Folder, path: str) -> None:
    with root.folder(path) as folder:
        folder.sync()

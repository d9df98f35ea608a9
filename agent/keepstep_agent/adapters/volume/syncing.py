"""Makes many files and folders of the volume durable at a time."""

import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, groupby
from pathlib import Path
from typing import Final

from keepstep_agent.adapters.volume.shared_volume import Folder, open_volume

# A filesystem commits its journal once for all threads that wait for it, so this many wait together.
_THREADS: Final = 16
# Batches per thread. Each batch costs as much as a file, and many batches even out large and small files.
_TURNS: Final = 16


def folder_of(path: str) -> str:
    return path.rpartition("/")[0]


def sync_all(volume: Path, root: Folder, files: Sequence[str], folders: Iterable[str]) -> list[os.stat_result]:
    """Make the files durable, then the folders. Return each file's status, taken just after its fsync.

    `root` is the open volume; paths are below it. Blocks. Raises OSError.
    """
    with ThreadPoolExecutor(_THREADS, "stage") as threads:
        synced = threads.map(lambda paths: _sync_files(volume, paths), _turns(files))
        found = list(chain.from_iterable(synced))
        for _ in threads.map(lambda path: _sync_folder(root, path), folders):
            pass
    return found


def _turns(paths: Sequence[str]) -> Iterator[Sequence[str]]:
    """Split the paths, in order, into the batches that threads take."""
    count = -(-len(paths) // (_THREADS * _TURNS))
    return (paths[begin : begin + count] for begin in range(0, len(paths), count))


def _sync_files(volume: Path, paths: Sequence[str]) -> list[os.stat_result]:
    found = []
    with open_volume(volume) as root:
        for above, together in groupby(paths, key=folder_of):
            with root.folder(above) as folder:
                for path in together:
                    with folder.opened_file(path.rpartition("/")[2]) as descriptor:
                        os.fsync(descriptor)
                        found.append(os.fstat(descriptor))
    return found


def _sync_folder(root: Folder, path: str) -> None:
    with root.folder(path) as folder:
        folder.sync()

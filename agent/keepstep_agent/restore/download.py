"""Downloads a checkpoint into a directory of the volume, and verifies each part and each pack.

Owns space, order and parallelism. Invariants: there is space for everything before the first byte is requested; a file
has at most two writers (more only contend for its lock); a file of a pack is written after every byte of its pack was
verified; when `download` returns, every file and directory is on disk; after a failure the directory holds garbage
that the caller removes, and no thread writes any more.
"""

import asyncio
import errno
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Final

from keepstep_agent.adapters.durable_files import write_all
from keepstep_agent.adapters.volume.disk import VolumeMeter
from keepstep_agent.adapters.volume.errors import volume_error
from keepstep_agent.adapters.volume.shared_folders import share_tree
from keepstep_agent.adapters.volume.shared_volume import Folder, open_volume
from keepstep_agent.catalog.fetching import PACKS_AT_ONCE, StoredPack, fetch_pack, fetch_parts, packs_at_once, packs_of
from keepstep_agent.catalog.object_reads import for_each
from keepstep_agent.catalog.reading import CommittedCheckpoint, StoredFile
from keepstep_agent.core.errors import ErrorKind, VolumeError
from keepstep_agent.core.model import Part
from keepstep_agent.ports import StoreReader

_FILES_TOGETHER: Final = 32
"""How many files each thread has open, of the 1024 that a process usually may. More would not be on disk sooner."""


async def fetch_packs(
    store: StoreReader,
    packs: Sequence[StoredPack],
    folder: Folder,
    *,
    concurrency: int,
    on_bytes: Callable[[int], None],
) -> None:
    """Write every file of `packs` below `folder`, whose subfolders exist. Raises StoreError or VolumeError."""
    loop = asyncio.get_running_loop()

    async def fetch(pack: StoredPack) -> None:
        body = await fetch_pack(store, pack)
        writing = loop.run_in_executor(threads, _write, pack, body, folder)
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            # Wait for the thread: the caller removes the folder next, and ending the threads, below, must not block.
            await asyncio.gather(writing, return_exceptions=True)
            raise
        on_bytes(pack.content_bytes)

    # A filesystem commits its own journal once for all threads that wait together.
    with ThreadPoolExecutor(PACKS_AT_ONCE, thread_name_prefix="keepstep-restore-packs") as threads:
        await for_each(packs, fetch, at_once=packs_at_once(packs, most=concurrency))


def _write(pack: StoredPack, body: bytes, folder: Folder) -> None:
    for first in range(0, len(pack.files), _FILES_TOGETHER):
        _write_together(pack, pack.files[first : first + _FILES_TOGETHER], body, folder)


def _write_together(pack: StoredPack, files: Sequence[StoredFile], body: bytes, folder: Folder) -> None:
    """Write all files before the first fsync, so that the disk has more to do at a time.

    Each file is synced before it is closed, because the kernel may forget the write errors of a closed file.
    """
    written: dict[str, int] = {}
    try:
        for file in files:
            path = file.entry.path
            written[path] = folder.open_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            write_all(written[path], pack.content(body, file), 0)
        for path in written:
            os.fsync(written[path])
    except OSError as error:
        raise volume_error(error, f"writing {path}") from error
    finally:
        for descriptor in written.values():
            os.close(descriptor)


_WRITERS_PER_FILE: Final = 2
_DIRECT_FROM_BYTES: Final = 8 * 1024**2
"""A file of at least this size is written past the page cache. The kernel may gather the many smaller ones."""
_BLOCK_BYTES: Final = 4096
_MOST_BYTES_AT_ONCE: Final = 256 * 1024**2
_REQUEST_SECONDS: Final = 4.0
"""How long a request should take at most. A request costs the event loop milliseconds, whatever it brings, but one that
breaks off is repeated whole."""
_GIB: Final = 1024**3


async def download(
    store: StoreReader,
    checkpoint: CommittedCheckpoint,
    folder: str,
    *,
    volume: Path,
    size_limit_bytes: int,
    disk: Executor,
    concurrency: int,
    on_progress: Callable[[int, int], None],
) -> None:
    """Fetch every file into `folder`, which is below the volume and made anew. `disk` has one thread.

    Raises StoreError or VolumeError. DISK_FULL says how much is needed and how much is free.
    """
    loop = asyncio.get_running_loop()
    needed_bytes = sum(-(-file.entry.size_bytes // _BLOCK_BYTES) * _BLOCK_BYTES for file in checkpoint.files)
    name = checkpoint.marker.info.name
    await loop.run_in_executor(disk, check_room, name, needed_bytes, volume, size_limit_bytes)
    target = await loop.run_in_executor(disk, _make_room, checkpoint, volume, folder)
    try:
        await _fetch_all(store, checkpoint, target, disk=disk, concurrency=concurrency, on_progress=on_progress)
        await loop.run_in_executor(disk, sync_folders, target, f"{volume}/{folder}")
    finally:
        # On the disk's one thread: work whose writer was cancelled may still run there.
        await asyncio.shield(loop.run_in_executor(disk, target.close))


async def _fetch_all(
    store: StoreReader,
    checkpoint: CommittedCheckpoint,
    target: Folder,
    *,
    disk: Executor,
    concurrency: int,
    on_progress: Callable[[int, int], None],
) -> None:
    loop = asyncio.get_running_loop()
    done_bytes = 0
    # Computed once: it is a sum over all files.
    total_bytes = checkpoint.size_bytes
    on_progress(0, total_bytes)

    def arrived(size_bytes: int) -> None:
        nonlocal done_bytes
        done_bytes += size_bytes
        on_progress(done_bytes, total_bytes)

    async def fill(file: _IncomingFile) -> None:
        descriptor = file.open()
        while parts := file.take(sizes.next_bytes()):
            size_bytes = sum(part.size_bytes for part in parts)
            sizes.asked(size_bytes)
            began_at = loop.time()
            await fetch_parts(store, file.stored, parts, descriptor)
            sizes.took(size_bytes, loop.time() - began_at)
            arrived(size_bytes)
        file.writers -= 1
        if not file.writers:
            await loop.run_in_executor(disk, file.finish)

    # The largest first, so that no long file is left to the end.
    alone = [stored for stored in checkpoint.files if not stored.entry.place]
    ordered = sorted(alone, key=lambda stored: stored.entry.size_bytes, reverse=True)
    files = [_IncomingFile(stored, target) for stored in ordered]
    writers = [file for file in files for _ in range(file.writers)]
    sizes = _RequestSizes(sum(stored.entry.size_bytes for stored in alone), min(concurrency, len(writers)))
    try:
        await for_each(writers, fill, at_once=concurrency)
    finally:
        # As above: a `finish` may have outlived its cancelled writer.
        await asyncio.shield(loop.run_in_executor(disk, _close, files))
    packs = packs_of(checkpoint.files)
    await fetch_packs(store, packs, target, concurrency=concurrency, on_bytes=arrived)


class _RequestSizes:
    """How many bytes the next request asks for, whichever file they belong to.

    It begins with one part, and doubles as long as requests are short. Requests that are not ask for what arrives in
    `_REQUEST_SECONDS` at their rate. None asks for more than one connection's share of what is left, so that no
    connection waits long for others at the end.
    """

    def __init__(self, left_bytes: int, connections: int) -> None:
        self._left_bytes = left_bytes
        self._connections = connections
        self._at_once_bytes = 0

    def next_bytes(self) -> int:
        return min(self._at_once_bytes, self._left_bytes // self._connections, _MOST_BYTES_AT_ONCE)

    def asked(self, size_bytes: int) -> None:
        self._left_bytes -= size_bytes

    def took(self, size_bytes: int, seconds: float) -> None:
        """Note how long a request took that ended just now."""
        if seconds < _REQUEST_SECONDS / 2:
            # The end of a file may be small, and says nothing of larger requests.
            self._at_once_bytes = max(self._at_once_bytes, 2 * size_bytes)
        else:
            self._at_once_bytes = int(size_bytes / seconds * _REQUEST_SECONDS)


class _IncomingFile:
    """A file that up to two writers fill from one queue of parts."""

    def __init__(self, stored: StoredFile, target: Folder) -> None:
        self.stored = stored
        self.writers = max(1, min(_WRITERS_PER_FILE, len(stored.entry.checksums)))
        self._waiting: Iterator[Part] = iter(stored.entry.parts())
        self._part_bytes = max(1, stored.entry.size_bytes // max(1, len(stored.entry.checksums)))
        self._target = target
        self._path = stored.entry.path
        self._descriptor = -1

    def take(self, size_bytes: int) -> Sequence[Part]:
        """Return the next parts, about so many bytes and at least one part; none at the end."""
        return tuple(islice(self._waiting, max(1, round(size_bytes / self._part_bytes))))

    def open(self) -> int:
        """Return the descriptor to write to. The first writer opens it, so that few are open at a time."""
        if self._descriptor < 0:
            try:
                self._descriptor = open_to_write(self._target, self._path, self.stored.entry.size_bytes)
            except OSError as error:
                raise volume_error(error, f"opening {self._path}") from error
        return self._descriptor

    def finish(self) -> None:
        """Put the bytes on disk. Blocks."""
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise volume_error(error, f"writing {self._path}") from error
        self.close()

    def close(self) -> None:
        """Close the file, on the same thread as `finish`. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def open_to_write(target: Folder, path: str, size_bytes: int) -> int:
    """Open an existing file, of this size when it is whole, past the page cache if it is large. Raises OSError."""
    if size_bytes >= _DIRECT_FROM_BYTES:
        try:
            return target.open_file(path, os.O_WRONLY | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # The filesystem keeps all its files in memory, or always uses the page cache.
    return target.open_file(path, os.O_WRONLY)


def _close(files: Iterable[_IncomingFile]) -> None:
    for file in files:
        file.close()


def check_room(name: str, needed_bytes: int, volume: Path, size_limit_bytes: int) -> None:
    """Raise VolumeError(DISK_FULL) if the checkpoint `name` does not fit. `size_limit_bytes` 0: none. Blocks."""
    reading = VolumeMeter(volume).measure()
    free_bytes = reading.free_bytes
    if size_limit_bytes:
        free_bytes = min(free_bytes, max(0, size_limit_bytes - reading.used_bytes))
    if needed_bytes > free_bytes:
        raise VolumeError(
            ErrorKind.DISK_FULL,
            f"{name} needs {needed_bytes:,} bytes ({needed_bytes / _GIB:.1f} GiB), "
            f"{volume} has {free_bytes:,} ({free_bytes / _GIB:.1f} GiB) free",
            hint="make the volume larger, or remove local checkpoints that are no longer needed",
        )


def _make_room(checkpoint: CommittedCheckpoint, volume: Path, folder: str) -> Folder:
    """Make the folder, its subfolders, and every file that is an object of its own, at its full size."""
    try:
        with open_volume(volume) as root:
            root.remove(folder)
            target = root.make_folder(folder)
            try:
                for file in checkpoint.files:
                    path = file.entry.path
                    above = path.rpartition("/")[0]
                    if above:
                        target.make_folder(above).close()
                    if file.entry.place:
                        continue
                    with target.opened_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as descriptor:
                        if file.entry.size_bytes:
                            os.posix_fallocate(descriptor, 0, file.entry.size_bytes)
                share_tree(target, root)
            except BaseException:
                target.close()
                raise
    except OSError as error:
        raise volume_error(error, f"making room for {checkpoint.marker.info.name} in {volume}") from error
    return target


def sync_folders(target: Folder, shown: str) -> None:
    """Sync `target` and all folders below it. Whoever renames `target` makes its name durable."""
    try:
        for _, folder, _ in target.walk():
            folder.sync()
    except OSError as error:
        raise volume_error(error, f"writing {shown}") from error

"""Packs of small files into a folder of the volume: fetched and verified whole, written by threads, on disk at once.

Owns the small files' half of `download`. Invariants: a file is made after every byte of its pack was verified; when
`fetch_packs` returns, every file is on disk, its folder's entry of it is not; when it fails, no thread writes any more.
"""

import asyncio
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from mooring_agent.adapters.volume.errors import volume_error
from mooring_agent.adapters.volume.shared_volume import Folder
from mooring_agent.catalog import PACKS_AT_ONCE, StoredFile, StoredPack, fetch_pack, packs_at_once
from mooring_agent.catalog.fan_out import for_each
from mooring_agent.ports import ObjectStore

_FILES_TOGETHER: Final = 32
"""So many are open in each thread, of the 1024 that a process may usually have; more would not be on disk sooner."""


async def fetch_packs(
    store: ObjectStore,
    packs: Sequence[StoredPack],
    folder: Folder,
    *,
    concurrency: int,
    on_bytes: Callable[[int], None],
) -> None:
    """Make every file of `packs` below `folder`, whose subfolders are there. StoreError or VolumeError."""
    loop = asyncio.get_running_loop()

    async def fetch(pack: StoredPack) -> None:
        body = await fetch_pack(store, pack)
        writing = loop.run_in_executor(threads, _write, pack, body, folder)
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            # Whoever cancels removes the folder, and not from under a thread; nor may ending the threads block, below.
            await asyncio.gather(writing, return_exceptions=True)
            raise
        on_bytes(pack.content_bytes)

    # A filesystem commits its own journal once for all that wait together.
    with ThreadPoolExecutor(PACKS_AT_ONCE, thread_name_prefix="mooring-restore-packs") as threads:
        await for_each(packs, fetch, at_once=packs_at_once(packs, most=concurrency))


def _write(pack: StoredPack, body: bytes, folder: Folder) -> None:
    for first in range(0, len(pack.files), _FILES_TOGETHER):
        _write_together(pack, pack.files[first : first + _FILES_TOGETHER], body, folder)


def _write_together(pack: StoredPack, files: Sequence[StoredFile], body: bytes, folder: Folder) -> None:
    """All are written before the first is waited for: the disk has more to do at a time.

    Each is waited for before it is closed: what befell a closed file's bytes the kernel may have forgotten.
    """
    written: dict[str, int] = {}
    try:
        for file in files:
            path = file.entry.path
            written[path] = folder.open_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            content = pack.content(body, file)
            while content:
                content = content[os.write(written[path], content) :]
        for path in written:
            os.fsync(written[path])
    except OSError as error:
        raise volume_error(error, f"writing {path}") from error
    finally:
        for descriptor in written.values():
            os.close(descriptor)

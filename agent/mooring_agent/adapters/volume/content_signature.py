"""What an announcement means, as one value: two that are equal are the same files with the same content."""

import contextlib
import hashlib
import os
import stat
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from mooring_agent.adapters.volume.shared_volume import open_volume
from mooring_agent.adapters.volume.source_walk import resolve_source, resolve_sources


def content_signature(volume: Path, source: str, files: Sequence[str] = ()) -> str:
    """Changes whenever a file below `source` is added, removed, replaced or rewritten. Reads no file.

    With `files` it covers these alone, which are relative to `source`. Raises RequestError or VolumeError when `source`
    is no place in the volume, or one of `files` is missing; looks at nothing then.
    """
    digest = hashlib.blake2b(digest_size=16)
    if files:
        named = resolve_sources(volume, source, files)
        with contextlib.suppress(OSError), open_volume(volume) as root:
            for above, together in groupby(named.items(), key=lambda item: item[1].rpartition("/")[0]):
                with root.folder(above) as folder:
                    for path, found in together:
                        _add(digest, path, folder.status(found.rpartition("/")[2]))
        return digest.hexdigest()
    found = resolve_source(volume, source)
    # What cannot be listed, or goes while we look, staging will name.
    with contextlib.suppress(OSError), open_volume(volume) as root:
        status = root.status(found) if found else os.fstat(root.descriptor)
        _add(digest, found, status)
        if stat.S_ISDIR(status.st_mode):
            with root.folder(found) as folder:
                for prefix, _, entries in folder.walk(lambda path, error: None):
                    for entry in entries:
                        with contextlib.suppress(OSError):
                            _add(digest, prefix + entry.name, entry.stat(follow_symlinks=False))
    return digest.hexdigest()


def _add(digest: "hashlib.blake2b", path: str, status: os.stat_result) -> None:
    digest.update(b"%b\0%d %d %d\n" % (os.fsencode(path), status.st_ino, status.st_size, status.st_mtime_ns))

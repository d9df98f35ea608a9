"""What is below a path now, as one value: two that are equal are the same files with the same content."""

import contextlib
import hashlib
import os
from pathlib import Path

from mooring_agent.adapters.volume.source_walk import resolve_source


def content_signature(volume: Path, source: str) -> str:
    """Changes whenever a file below `source` is added, removed, replaced or rewritten. Reads no file.

    Raises RequestError or VolumeError when `source` is no place in the volume; looks at nothing then.
    """
    root = resolve_source(volume, source)
    digest = hashlib.blake2b(digest_size=16)
    # What cannot be listed, or goes while we look, staging will name.
    for folder, folders, files in os.walk(root):
        folders.sort()
        for name in (*folders, *sorted(files)):
            _add(digest, f"{folder}/{name}")
    _add(digest, str(root))
    return digest.hexdigest()


def _add(digest: "hashlib.blake2b", path: str) -> None:
    with contextlib.suppress(OSError):
        found = os.lstat(path)
        digest.update(b"%b\0%d %d %d\n" % (os.fsencode(path), found.st_ino, found.st_size, found.st_mtime_ns))

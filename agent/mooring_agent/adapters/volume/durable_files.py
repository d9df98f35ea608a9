"""Names and bytes that survive a power cut, in folders that are ours alone: what a plain write leaves out."""

import os
from pathlib import Path

from mooring_agent.adapters.volume.shared_volume import PARTIAL_SUFFIX


def write_durably(path: Path, content: bytes) -> None:
    """Replace `path` whole; a reader and a crash see the old file or the new one."""
    partial = path.with_name(path.name + PARTIAL_SUFFIX)
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable: new, renamed and removed ones."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

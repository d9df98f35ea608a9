"""Files with known bytes, regions of them as the core would name them, and what a trainer does to them meanwhile."""

import os
import random
from pathlib import Path

from keepstep_agent.adapters.checksum import region_checksum
from keepstep_agent.adapters.transfer.upload_body import PIECE_BYTES
from keepstep_agent.core.model import Fingerprint, Region


def make_file(path: Path, size_bytes: int, seed: int = 0) -> Path:
    path.write_bytes(random.Random(seed).randbytes(size_bytes))
    return path


def region_of(path: Path, offset_bytes: int = 0, size_bytes: int | None = None) -> Region:
    """A region of the file as it is now; to its end by default."""
    status = path.stat()
    return Region(
        volume=str(path.parent),
        path=path.name,
        offset_bytes=offset_bytes,
        size_bytes=status.st_size - offset_bytes if size_bytes is None else size_bytes,
        fingerprint=Fingerprint(size_bytes=status.st_size, mtime_ns=status.st_mtime_ns, inode=status.st_ino),
    )


def parts_of(path: Path, part_size_bytes: int) -> list[tuple[Region, int]]:
    """Consecutive regions with their checksums."""
    size = path.stat().st_size
    regions = [
        region_of(path, offset, min(part_size_bytes, size - offset)) for offset in range(0, size, part_size_bytes)
    ]
    return [(region, region_checksum(region)) for region in regions]


def truncate(path: Path) -> None:
    os.truncate(path, PIECE_BYTES)


def rewrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-10, os.SEEK_END)
        file.write(b"0123456789")


def touch(path: Path) -> None:
    os.utime(path, ns=(0, 0))

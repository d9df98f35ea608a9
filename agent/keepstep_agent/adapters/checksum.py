"""Checksums of bytes and of file regions.

Manifests carry CRC64NVME. The other checksums exist because some stores check only those. All functions block and
release the GIL; callers choose the thread.
"""

import hashlib
import mmap
from collections.abc import Callable
from queue import LifoQueue
from typing import TYPE_CHECKING, Final

from keepstep_agent.adapters.region_file import RegionFile, file_changed
from keepstep_agent.core.model import Region

if TYPE_CHECKING:
    from typing_extensions import Buffer

CHUNK_BYTES: Final = 512 * 1024
"""Small enough to be still in a core's cache when its checksum is computed, large enough that the threads which do so
seldom wait for the interpreter's lock."""

_AT_ONCE: Final = 4
_buffers: Final[LifoQueue[memoryview]] = LifoQueue()
"""One buffer for each thread of a store. More, for the threads that stage, would be no faster. Buffers are kept for
good, because a new one costs as much as copying into it. A mapping takes memory only once it is used. It is private,
or a forked process would read into the buffers of the other."""
for _ in range(_AT_ONCE):
    _buffers.put(memoryview(mmap.mmap(-1, CHUNK_BYTES, flags=mmap.MAP_PRIVATE)))


# awscrt is imported where it is used, because an agent serves before it opens its store, which needs awscrt.
def crc64nvme(data: "Buffer", previous: int = 0) -> int:
    from awscrt import checksums

    return int(checksums.crc64nvme(data, previous))


def joined_crc64nvme(first: int, second: int, second_bytes: int) -> int:
    """CRC64NVME of two pieces in a row, from that of each. `second_bytes` is the size of the second."""
    from awscrt import checksums

    return int(checksums.combine_crc64nvme(first, second, second_bytes))


def crc32c(data: "Buffer", previous: int = 0) -> int:
    from awscrt import checksums

    return int(checksums.crc32c(data, previous))


def region_checksum(region: Region) -> int:
    """CRC64NVME of a region. Raises FILE_CHANGED or FILE_MISSING if, before or after, it is not what was staged."""
    value = 0

    def update(data: memoryview) -> None:
        nonlocal value
        value = crc64nvme(data, value)

    _read(region, update)
    return value


def check_region(region: Region, checksum: int) -> None:
    """Raise FILE_CHANGED unless the region's CRC64NVME still is `checksum`. Other errors as `region_checksum`."""
    require_checksum(region, region_checksum(region), checksum)


def require_checksum(region: Region, found: int, expected: int) -> None:
    """Raise FILE_CHANGED unless both checksums are the same."""
    if found != expected:
        end = region.offset_bytes + region.size_bytes
        raise file_changed(
            region.file, f"bytes {region.offset_bytes} to {end} have checksum {found:016x} instead of {expected:016x}"
        )


def region_crc32c(region: Region, checksum: int) -> int:
    """CRC32C of a region, for stores that check only this one. Errors as `check_region`.

    Computed in the same reading that verifies the CRC64NVME `checksum`, so both are of the same bytes.
    """
    found = value = 0

    def update(data: memoryview) -> None:
        nonlocal found, value
        found, value = crc64nvme(data, found), crc32c(data, value)

    _read(region, update)
    require_checksum(region, found, checksum)
    return value


def region_sha256(region: Region) -> str:
    """SHA-256 of a region as hexadecimal: the signature of a payload. Errors as `region_checksum`."""
    digest = hashlib.sha256()
    _read(region, digest.update)
    return digest.hexdigest()


def region_md5(region: Region) -> str:
    """MD5 of a region as hexadecimal: most stores report it, so it identifies a part sent before a crash."""
    digest = hashlib.md5(usedforsecurity=False)
    _read(region, digest.update)
    return digest.hexdigest()


def _read(region: Region, update: Callable[[memoryview], None]) -> None:
    buffer = _buffers.get()
    try:
        with RegionFile(region) as file:
            for position in range(0, region.size_bytes, CHUNK_BYTES):
                piece = buffer[: min(CHUNK_BYTES, region.size_bytes - position)]
                file.read_into(position, piece)
                update(piece)
            file.check()
    finally:
        _buffers.put(buffer)

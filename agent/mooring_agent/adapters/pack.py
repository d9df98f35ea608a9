"""A pack in memory: small files put together as a tar archive, and taken apart again.

Owns what the archive's bytes are, for given files always the same; where they lie in it is `core.pack_plan`'s. Knows
nothing of stores. All functions block. They raise VolumeError only.
"""

import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mooring_agent.adapters.checksum import crc64nvme
from mooring_agent.adapters.region_file import RegionFile
from mooring_agent.core.model import Pack, Region, StagedFile
from mooring_agent.core.pack_plan import HEADER_BYTES

_LATEST_SECONDS: Final = 8**11 - 1
_FILE_MODE: Final = 0o644


@dataclass(frozen=True, slots=True, kw_only=True)
class PackBody:
    """The archive's bytes, their CRC64NVME, and that of each file in order."""

    data: bytearray
    checksum: int
    file_checksums: tuple[int, ...]


def read_pack(pack: Pack, volume: Path) -> PackBody:
    """Put the files together. FILE_CHANGED or FILE_MISSING if one of them is not what was staged, before or after."""
    data = bytearray(pack.size_bytes)
    view = memoryview(data)
    checksums = []
    for file, offset_bytes in zip(pack.files, pack.offsets_bytes, strict=True):
        view[offset_bytes - HEADER_BYTES : offset_bytes] = _header(file)
        content = view[offset_bytes : offset_bytes + file.size_bytes]
        region = Region(
            path=str(volume / file.pin), offset_bytes=0, size_bytes=file.size_bytes, fingerprint=file.fingerprint
        )
        with RegionFile(region) as source:
            source.read_into(0, content)
            source.check()
        checksums.append(crc64nvme(content))
    return PackBody(data=data, checksum=crc64nvme(data), file_checksums=tuple(checksums))


def _header(file: StagedFile) -> bytes:
    """Whoever unpacks it gets the file's time, and a mode that suits a checkpoint."""
    entry = tarfile.TarInfo(file.path)
    entry.size = file.size_bytes
    entry.mode = _FILE_MODE
    entry.mtime = min(max(0, file.fingerprint.mtime_ns // 10**9), _LATEST_SECONDS)
    header = entry.tobuf(tarfile.USTAR_FORMAT, "utf-8", "strict")
    assert len(header) == HEADER_BYTES, file.path
    return header

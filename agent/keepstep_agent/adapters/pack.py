"""Builds a pack in memory: small files in one tar archive.

Owns the archive's bytes, which are always the same for the same files. `core.stored.packs_and_parts` decides where each
file lies in it. Knows nothing of stores. All functions block. They raise VolumeError only.
"""

import os
import tarfile
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Final

from keepstep_agent.adapters.checksum import crc64nvme
from keepstep_agent.adapters.region_file import file_changed
from keepstep_agent.adapters.volume.errors import volume_error
from keepstep_agent.adapters.volume.shared_volume import Folder, fingerprint, open_volume
from keepstep_agent.core.errors import VolumeError
from keepstep_agent.core.model import StagedFile
from keepstep_agent.core.stored.packs_and_parts import HEADER_BYTES, Pack

_LATEST_SECONDS: Final = 8**11 - 1
_FILE_MODE: Final = 0o644
_NAME_BYTES: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class PackBody:
    """The archive's bytes, their CRC64NVME, and the CRC64NVME of each file in order."""

    data: bytearray
    checksum: int
    file_checksums: tuple[int, ...]


def read_pack(pack: Pack, volume: Path) -> PackBody:
    """Read the files into an archive. Raises FILE_CHANGED or FILE_MISSING if one of them is not what was staged."""
    data = bytearray(pack.size_bytes)
    view = memoryview(data)
    checksums = []
    placed = zip(pack.files, pack.offsets_bytes, strict=True)
    # A folder is opened once for all its files.
    for above, together in groupby(placed, key=lambda one: one[0].pin.rpartition("/")[0]):
        with _open_folder(volume, above) as folder:
            for file, offset_bytes in together:
                view[offset_bytes - HEADER_BYTES : offset_bytes] = _header(file)
                content = view[offset_bytes : offset_bytes + file.size_bytes]
                try:
                    _read(folder, volume, file, content)
                except VolumeError as error:
                    error.path = file.path
                    raise
                checksums.append(crc64nvme(content))
    return PackBody(data=data, checksum=crc64nvme(data), file_checksums=tuple(checksums))


def _open_folder(volume: Path, path: str) -> Folder:
    try:
        with open_volume(volume) as root:
            return root.folder(path)
    except OSError as error:
        raise volume_error(error, f"open {volume}/{path}") from error


def _read(folder: Folder, volume: Path, file: StagedFile, content: memoryview) -> None:
    """Read a whole small file. Its fingerprint after the read shows whether it was what was staged, before it, too.

    It makes as few system calls as possible: each may wait for the interpreter's lock, and a checkpoint can have ten
    thousand such files.
    """
    try:
        descriptor = folder.open_file(file.pin.rpartition("/")[2])
        try:
            count = os.preadv(descriptor, [content], 0) if content else 0
            found = fingerprint(os.fstat(descriptor))
        finally:
            os.close(descriptor)
    except OSError as error:
        raise volume_error(error, f"read {volume}/{file.pin}") from error
    if found != file.fingerprint:
        raise file_changed(f"{volume}/{file.pin}", "it was replaced or written to after it was staged")
    if count < len(content):
        raise file_changed(f"{volume}/{file.pin}", f"it ended at byte {count}")


def _header(file: StagedFile) -> bytes:
    """Return a file's tar header, with its path, size and mtime and a mode that suits a checkpoint."""
    seconds = min(max(0, file.fingerprint.mtime_ns // 10**9), _LATEST_SECONDS)
    name = file.path.encode()
    if len(name) > _NAME_BYTES:
        header = _tar_header(file.path, file.size_bytes, seconds)
    else:
        # The same bytes as tarfile's, in an eighth of the time. The checksum is a sum that counts its own field as
        # spaces.
        size, time = b"%011o" % file.size_bytes, b"%011o" % seconds
        checksum = b"%06o" % (_PLAIN_SUM + sum(name) + sum(size) + sum(time))
        header = name.ljust(_NAME_BYTES, b"\0") + b"%b%b\0%b\0%b\0 %b" % (_OWNER, size, time, checksum, _REST)
    assert len(header) == HEADER_BYTES, file.path
    return header


def _tar_header(path: str, size_bytes: int, seconds: int) -> bytes:
    entry = tarfile.TarInfo(path)
    entry.size = size_bytes
    entry.mode = _FILE_MODE
    entry.mtime = seconds
    return entry.tobuf(tarfile.USTAR_FORMAT, "utf-8", "strict")


_PLAIN: Final = _tar_header("", 0, 0)
# The fields between the name and the size, and after the checksum, are the same for every file.
_OWNER, _REST = _PLAIN[100:124], _PLAIN[156:]
_PLAIN_SUM: Final = sum(_OWNER) + sum(_REST) + 8 * ord(" ")

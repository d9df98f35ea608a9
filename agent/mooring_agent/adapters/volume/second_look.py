"""A second reading of pinned files when all of them were sent: was one written to in place without a trace?

A pin is another name of the trainer's own file. Its size and mtime show most writes; not a write whose mtime is set
back afterwards, nor, in memory (tmpfs), one through a mapping. Where one of these may have been, the bytes are read
again and compared with what was sent. In memory that is every file. On a disk it is every file whose time of change
moved: a write moves it, but also a trainer that renames or unlinks its own name, as rotation does. It costs a thread
more than a second per GB, so the caller says when there is no time for it.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from mooring_agent.adapters.checksum import check_region
from mooring_agent.adapters.volume.errors import volume_error
from mooring_agent.adapters.volume.shared_volume import fingerprint, open_volume
from mooring_agent.core.errors import ErrorKind, VolumeError
from mooring_agent.core.model import FileEntry, RankManifest, Region, StagedFile


def check_sent(volume: Path, manifest: RankManifest, files: Sequence[StagedFile], may_read: Callable[[], bool]) -> None:
    """As ports.StagingArea.check_sent."""
    try:
        suspects = list(_suspects(volume, manifest, files))
    except OSError as error:
        raise volume_error(error, f"looking at save {manifest.info.save} again") from error
    for file, entry in suspects:
        for part, checksum in zip(entry.parts(), entry.checksums, strict=True):
            if not may_read():
                return
            region = Region(
                volume=str(volume),
                path=file.pin,
                offset_bytes=part.offset_bytes,
                size_bytes=part.size_bytes,
                fingerprint=file.fingerprint,
            )
            check_region(region, checksum)


def rewritten_in_place(what: str) -> VolumeError:
    return VolumeError(
        ErrorKind.FILE_CHANGED,
        f"{what}, was rewritten in place after it was announced",
        hint="write checkpoints to new files (a new name, or a temporary file and a rename)",
    )


def _suspects(
    volume: Path, manifest: RankManifest, files: Sequence[StagedFile]
) -> Iterator[tuple[StagedFile, FileEntry]]:
    with open_volume(volume) as root:
        read_all = _is_in_memory(os.fstat(root.descriptor).st_dev)
        for file, entry in zip(files, manifest.files, strict=True):
            if file.private:
                continue
            try:
                status = root.status(file.pin)
            except FileNotFoundError:
                continue  # all of it was sent
            if fingerprint(status) != file.fingerprint:
                raise rewritten_in_place(f"{file.path} of save {manifest.info.save}, rank {manifest.rank}")
            # Nobody can set the time of change; a trainer that renames or unlinks its own name moves it, too.
            if read_all or status.st_ctime_ns != file.changed_ns:
                yield file, entry


def _is_in_memory(device: int) -> bool:
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text(errors="replace").splitlines():
        mount, _, filesystem = line.partition(" - ")
        if mount.split(" ")[2:3] == [wanted]:
            return filesystem.split(" ")[0] in {"tmpfs", "ramfs"}
    return False

"""Compares the content of files: the signature of an announcement, and a second reading of pinned files.

Two announcements with equal signatures mean the same files with the same content.

A pin is another name of the trainer's own file. Its size and mtime reveal most writes, but not a write after which the
mtime is set back, nor, on tmpfs, a write through a mapping. Where such a write is possible, the bytes are read again
after the upload and compared with what was sent: every file on tmpfs, and every file on a disk whose ctime moved (a
rename or unlink by the trainer moves it too). The second reading takes a thread more than a second per GB, so the
caller can stop it when time is short.
"""

import contextlib
import hashlib
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from itertools import compress, groupby
from pathlib import Path

from keepstep_agent.adapters.checksum import check_region
from keepstep_agent.adapters.region_file import part_region
from keepstep_agent.adapters.volume.announced_files import resolve_files, resolve_path
from keepstep_agent.adapters.volume.errors import volume_error
from keepstep_agent.adapters.volume.shared_volume import fingerprint, open_volume
from keepstep_agent.core.errors import ErrorKind, VolumeError
from keepstep_agent.core.file_lists import StagedFiles
from keepstep_agent.core.model import RankManifest


def content_signature(volume: Path, path: str, files: Sequence[str] = ()) -> str:
    """Return a signature that changes when a file below `path` is added, removed, replaced or rewritten.

    It reads names and times, no file's content. With `files`, which are relative to `path`, it covers these alone.
    Raises RequestError or VolumeError if `path` is not in the volume, or if one of `files` is missing.
    """
    digest = hashlib.blake2b(digest_size=16)
    if files:
        named = resolve_files(volume, path, files)
        with contextlib.suppress(OSError), open_volume(volume) as root:
            for above, together in groupby(named, key=lambda item: item[1].rpartition("/")[0]):
                with root.folder(above) as folder:
                    for name, found in together:
                        _add(digest, name, folder.status(found.rpartition("/")[2]))
        return digest.hexdigest()
    found = resolve_path(volume, path)
    # Staging reports folders that cannot be listed and files that vanish meanwhile.
    with contextlib.suppress(OSError), open_volume(volume) as root:
        status = root.status(found) if found else os.fstat(root.descriptor)
        _add(digest, found, status)
        if stat.S_ISDIR(status.st_mode):
            with root.folder(found) as folder:
                for prefix, opened, entries in folder.walk(lambda path, error: None):
                    for entry in entries:
                        with contextlib.suppress(OSError):
                            _add(digest, prefix + entry.name, opened.status_of(entry))
    return digest.hexdigest()


def _add(digest: "hashlib.blake2b", path: str, status: os.stat_result) -> None:
    digest.update(b"%b\0%d %d %d\n" % (os.fsencode(path), status.st_ino, status.st_size, status.st_mtime_ns))


def check_sent(volume: Path, manifest: RankManifest, files: StagedFiles, may_read: Callable[[], bool]) -> None:
    """See `ports.StagingArea.check_sent`."""
    try:
        suspects = bytes(_suspects(volume, manifest, files))
    except OSError as error:
        raise volume_error(error, f"checking save {manifest.info.save} again") from error
    for file, entry in compress(zip(files, manifest.own_files, strict=True), suspects):
        for part, checksum in zip(entry.parts(), entry.checksums, strict=True):
            if not may_read():
                return
            try:
                check_region(part_region(volume, file.pin, part, file.fingerprint), checksum)
            except VolumeError as error:
                error.path = file.path
                raise


def rewritten_in_place(what: str) -> VolumeError:
    return VolumeError(
        ErrorKind.FILE_CHANGED,
        f"{what}, was rewritten in place after it was announced",
        hint="write checkpoints to new files (a new name, or a temporary file and a rename)",
    )


def _suspects(volume: Path, manifest: RankManifest, files: StagedFiles) -> Iterator[bool]:
    """Yield for each file whether its bytes must be read again. Raises FILE_CHANGED if one was written to."""
    with open_volume(volume) as root:
        read_all = _is_in_memory(os.fstat(root.descriptor).st_dev)
        for file in files:
            if file.private:
                yield False
                continue
            try:
                status = root.status(file.pin)
            except FileNotFoundError:
                yield False  # all its bytes were sent
                continue
            if fingerprint(status) != file.fingerprint:
                raise rewritten_in_place(f"{file.path} of save {manifest.info.save}, rank {manifest.rank}")
            # No program can set the ctime. A trainer that renames or unlinks its own name moves it, too.
            yield read_all or status.st_ctime_ns != file.changed_ns


def _is_in_memory(device: int) -> bool:
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text(errors="replace").splitlines():
        mount, _, filesystem = line.partition(" - ")
        if mount.split(" ")[2:3] == [wanted]:
            return filesystem.split(" ")[0] in {"tmpfs", "ramfs"}
    return False

"""Pins a file in the staging area, by hard link, reflink or copy, and describes the pins of a rank.

The descriptor `<save>/rank-00003.json` lies beside the pins. It says what was announced and which files the pins are.
"""

import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Final, Literal

import msgspec
import structlog

from keepstep_agent.adapters.volume.errors import volume_error
from keepstep_agent.adapters.volume.shared_volume import Folder, fingerprint
from keepstep_agent.core.errors import ErrorKind, RequestError, VolumeError
from keepstep_agent.core.file_lists import StagedFiles
from keepstep_agent.core.limits import DESCRIPTOR_BYTES, SAVE_BYTES
from keepstep_agent.core.model import Fingerprint, PinMethod, SourceFile
from keepstep_agent.core.stored import checked_json
from keepstep_agent.core.stored.object_layout import check_file_path
from keepstep_agent.ports import StagedDescriptor

_FICLONE: Final = 0x40049409
_LINK_REFUSALS: Final = frozenset({errno.EPERM, errno.EXDEV, errno.EMLINK, errno.EOPNOTSUPP})
_COPY_REFUSALS: Final = frozenset({errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP})
_COPY_STEP_BYTES: Final = 1 << 30
# Kernels are built with ticks of at most 10 ms.
_TICK_SECONDS: Final = 0.02
# A link or a fifo has replaced the file.
_REPLACED: Final = frozenset({errno.ELOOP, errno.EINVAL})

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


class Pinner:
    """Pins files of one volume. Methods block and may be called from several threads."""

    def __init__(self, volume: Path) -> None:
        self._volume = volume
        self._reported: set[str] = set()

    def pin_source(self, source: Folder, file: SourceFile, target: Folder) -> bool:
        """Pin a file of an output directory, as `pin`. Raises FILE_CHANGED if it is not what a look has shown."""
        name = file.path.rpartition("/")[2]
        if file.method is PinMethod.COPY_AS_IS:
            return self.pin(source, name, target, name, private=True, may_grow=True)
        private = file.method is PinMethod.COPY
        return self.pin(source, name, target, name, private=private, expected=file.fingerprint)

    def pin(
        self,
        source: Folder,
        name: str,
        target: Folder,
        target_name: str,
        *,
        private: bool,
        may_grow: bool = False,
        expected: Fingerprint | None = None,
    ) -> bool:
        """Make `target_name` hold the bytes of `name`. Return whether it has its own inode (a reflink or copy).

        The file must look as `expected`, if that is given. With `may_grow` a copy has the bytes that were there at its
        start, even if the file changes meanwhile.
        """
        try:
            descriptor = source.open_file(name)
        except OSError as error:
            raise _changed(name) if error.errno in _REPLACED else volume_error(error, f"cannot open {name}") from error
        try:
            if expected is not None and fingerprint(os.fstat(descriptor)) != expected:
                raise _changed(name)
            if not private:
                try:
                    target.link_open_file(descriptor, target_name)
                except OSError as error:
                    if error.errno not in _LINK_REFUSALS:
                        raise volume_error(error, f"cannot pin {name}") from error
                    self._report_once("hard_link_refused", error)
                else:
                    return False
            self._copy(descriptor, name, target, target_name, may_grow=may_grow)
        finally:
            os.close(descriptor)
        return True

    def _copy(self, descriptor: int, source: str, target: Folder, target_name: str, *, may_grow: bool) -> None:
        before = os.fstat(descriptor)
        try:
            with target.opened_file(target_name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600) as copy:
                try:
                    fcntl.ioctl(copy, _FICLONE, descriptor)
                except OSError as error:
                    if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EIO}:
                        raise
                    self._report_once("reflink_refused", error)
                    _copy_bytes(descriptor, copy, before.st_size)
        except OSError as error:
            raise volume_error(error, f"cannot copy {source}") from error
        after = os.fstat(descriptor)
        if not may_grow and (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
            raise _changed(source)

    def _report_once(self, event: str, error: OSError) -> None:
        if event not in self._reported:
            self._reported.add(event)
            fallback = "copy" if event == "reflink_refused" else "reflink"
            _log.warning(event, volume=str(self._volume), reason=os.strerror(error.errno or 0), fallback=fallback)


def _copy_bytes(source: int, target: int, size_bytes: int) -> None:
    """Copy `size_bytes`, or fewer if the file has become shorter: the caller compares its size afterwards."""
    offset = 0
    in_kernel = True
    while offset < size_bytes:
        wanted = min(_COPY_STEP_BYTES, size_bytes - offset)
        try:
            if in_kernel:
                count = os.copy_file_range(source, target, wanted, offset, offset)
            else:
                count = os.sendfile(target, source, offset, wanted)
        except OSError as error:
            if not in_kernel or error.errno not in _COPY_REFUSALS:
                raise
            # The filesystems may be of different kinds. sendfile writes at the target's file offset, so set it first.
            in_kernel = False
            os.lseek(target, offset, os.SEEK_SET)
            continue
        if count == 0:
            return
        offset += count


def _changed(source: str) -> VolumeError:
    return VolumeError(
        ErrorKind.FILE_CHANGED,
        f"{source} was replaced or written to while it was being staged",
        hint="announce a checkpoint after its last file is written, and do not write to it again",
    )


def let_a_tick_pass(mtime_ns: int) -> None:
    """Wait until a later write to a file of that mtime gets another one: kernels stamp files by a clock that ticks."""
    age_seconds = (time.time_ns() - mtime_ns) / 1e9
    if 0 <= age_seconds < _TICK_SECONDS:
        time.sleep(_TICK_SECONDS - age_seconds)


_TOO_LARGE_HINT: Final = "write fewer and larger files, with shorter paths"


class _Descriptor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: Literal[1]
    descriptor: StagedDescriptor
    files: StagedFiles


def read_descriptor(root: Folder, folder: str) -> tuple[StagedDescriptor, StagedFiles]:
    """Read the descriptor of the pins in `folder`. Raises OSError, and ValueError if it does not describe them."""
    try:
        value = msgspec.json.decode(root.read(f"{folder}.json", DESCRIPTOR_BYTES), type=_Descriptor)
        for path in value.files.paths:
            check_file_path(path)
    except (RecursionError, RequestError) as error:
        raise ValueError(str(error)) from error
    files = value.files
    if files.folder != folder or not files:
        raise ValueError(f"it lists {len(files)} pins of {files.folder}")
    size_bytes = sum(files.sizes_bytes)
    if size_bytes > SAVE_BYTES:
        raise ValueError(f"its files have {size_bytes:,} bytes, more than {SAVE_BYTES:,}")
    _check_sizes(root, files)
    return value.descriptor, files


def _check_sizes(root: Folder, files: StagedFiles) -> None:
    """Raise ValueError unless every pin is a regular file of its recorded size.

    The agent keeps lists in memory whose length follows from a size, such as the parts of a file.
    """
    for above, together in groupby(files, key=lambda file: file.pin.rpartition("/")[0]):
        with root.folder(above) as opened:
            for file in together:
                status = opened.status(file.pin.rpartition("/")[2])
                if not stat.S_ISREG(status.st_mode):
                    raise ValueError(f"the pin of {file.path} is no regular file")
                if status.st_size != file.size_bytes:
                    raise ValueError(f"the pin of {file.path} has {status.st_size} bytes instead of {file.size_bytes}")


def encode_descriptor(descriptor: StagedDescriptor, files: StagedFiles) -> Iterator[bytes]:
    """Yield the encoding in pieces. Raises RequestError if it exceeds the limits under which it can be read again."""
    _refuse_more("all its files together", sum(files.sizes_bytes), SAVE_BYTES)
    count = 0
    for piece in checked_json.pieces(_Descriptor(format=1, descriptor=descriptor, files=files)):
        count += len(piece)
        _refuse_more("the list of its files", count, DESCRIPTOR_BYTES)
        yield piece


def _refuse_more(what: str, count: int, most: int) -> None:
    if count > most:
        raise RequestError(ErrorKind.BAD_REQUEST, f"{what} would have more than {most:,} bytes", hint=_TOO_LARGE_HINT)

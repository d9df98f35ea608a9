"""What lies beside the pins of a rank: what was announced, and which files the pins are. `<save>/rank-00003.json`.

The trainer can write one, just as it can announce. So it is read as input: typed, within `core.limits`, every pin below
the folder that it describes and as large as it says; whoever opens the pins finds out whether they are what it says.
"""

import stat
from collections.abc import Sequence
from itertools import groupby
from typing import Annotated, Final, Literal

import msgspec

from mooring_agent.adapters.volume.shared_volume import Folder
from mooring_agent.core.errors import ErrorKind, RequestError
from mooring_agent.core.limits import DESCRIPTOR_BYTES, FILES_PER_RANK, SAVE_BYTES, Count, FileBytes, PathText, Stamp
from mooring_agent.core.model import Fingerprint, StagedFile
from mooring_agent.core.object_layout import check_file_path
from mooring_agent.ports import StagedDescriptor

_TOO_LARGE_HINT: Final = "write fewer and larger files, with shorter paths"


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    path: PathText
    size: FileBytes
    mtime_ns: Stamp
    inode: Count
    private: bool
    announced: bool
    changed_ns: Stamp


class _Descriptor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: Literal[1]
    descriptor: StagedDescriptor
    files: Annotated[list[_File], msgspec.Meta(min_length=1, max_length=FILES_PER_RANK)]


def read_descriptor(root: Folder, folder: str) -> tuple[StagedDescriptor, tuple[StagedFile, ...]]:
    """What was staged with the pins in `folder`. Raises OSError, and ValueError for what is no descriptor of them."""
    try:
        value = msgspec.json.decode(root.read(f"{folder}.json", DESCRIPTOR_BYTES), type=_Descriptor)
        for file in value.files:
            check_file_path(file.path)
    except (RecursionError, RequestError) as error:
        raise ValueError(str(error)) from error
    size_bytes = sum(file.size for file in value.files)
    if size_bytes > SAVE_BYTES:
        raise ValueError(f"its files have {size_bytes:,} bytes, more than {SAVE_BYTES:,}")
    files = tuple(
        StagedFile(
            path=file.path,
            pin=f"{folder}/{file.path}",
            fingerprint=Fingerprint(size_bytes=file.size, mtime_ns=file.mtime_ns, inode=file.inode),
            private=file.private,
            announced=file.announced,
            changed_ns=file.changed_ns,
        )
        for file in value.files
    )
    _check_sizes(root, files)
    return value.descriptor, files


def _check_sizes(root: Folder, files: Sequence[StagedFile]) -> None:
    """Before anybody counts on them: what follows from a size, as the parts of a file, is kept in memory."""
    for above, together in groupby(files, key=lambda file: file.pin.rpartition("/")[0]):
        with root.folder(above) as opened:
            for file in together:
                status = opened.status(file.pin.rpartition("/")[2])
                if not stat.S_ISREG(status.st_mode):
                    raise ValueError(f"the pin of {file.path} is no regular file")
                if status.st_size != file.size_bytes:
                    raise ValueError(f"the pin of {file.path} has {status.st_size} bytes instead of {file.size_bytes}")


def encode_descriptor(descriptor: StagedDescriptor, files: Sequence[StagedFile]) -> bytes:
    """The content of the descriptor. Raises RequestError for one that could not be read again."""
    content = msgspec.json.encode(
        _Descriptor(
            format=1,
            descriptor=descriptor,
            files=[
                _File(
                    path=file.path,
                    size=file.fingerprint.size_bytes,
                    mtime_ns=file.fingerprint.mtime_ns,
                    inode=file.fingerprint.inode,
                    private=file.private,
                    announced=file.announced,
                    changed_ns=file.changed_ns,
                )
                for file in files
            ],
        )
    )
    size_bytes = sum(file.size_bytes for file in files)
    for what, count, most in (
        ("the list of its files", len(content), DESCRIPTOR_BYTES),
        ("all its files together", size_bytes, SAVE_BYTES),
    ):
        if count > most:
            raise RequestError(
                ErrorKind.BAD_REQUEST, f"{what} would have {count:,} bytes, more than {most:,}", hint=_TOO_LARGE_HINT
            )
    return content

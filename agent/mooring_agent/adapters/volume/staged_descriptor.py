"""What lies beside the pins of a rank: what was announced, and which files the pins are. `<save>/rank-00003.json`.

The trainer can write one, just as it can announce. So it is read as input: typed and bounded, every pin below the
folder that it describes; whoever opens the pins finds out whether they are what it says.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal

import msgspec

from mooring_agent.adapters.volume.shared_volume import Folder
from mooring_agent.core.errors import RequestError
from mooring_agent.core.model import Fingerprint, StagedFile
from mooring_agent.core.object_layout import check_file_path

_LIMIT_BYTES: Final = 256 * 1024 * 1024
_Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    path: str
    size: _Number
    mtime_ns: int
    inode: _Number
    private: bool
    announced: bool
    changed_ns: int


class _Descriptor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: Literal[1]
    descriptor: dict[str, Any]
    files: Annotated[list[_File], msgspec.Meta(min_length=1)]


def read_descriptor(root: Folder, folder: str) -> tuple[Mapping[str, object], tuple[StagedFile, ...]]:
    """What was staged with the pins in `folder`. Raises OSError, and ValueError for what is no descriptor."""
    try:
        value = msgspec.json.decode(root.read(f"{folder}.json", _LIMIT_BYTES), type=_Descriptor)
        for file in value.files:
            check_file_path(file.path)
    except (msgspec.MsgspecError, RecursionError, RequestError) as error:
        raise ValueError(str(error)) from error
    return value.descriptor, tuple(
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


def encode_descriptor(descriptor: Mapping[str, object], files: Sequence[StagedFile]) -> bytes:
    """The content of the descriptor; `descriptor` is the request's own, JSON that means nothing here."""
    return msgspec.json.encode(
        _Descriptor(
            format=1,
            descriptor=dict(descriptor),
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

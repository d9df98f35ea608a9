"""Records: one small JSON file per local checkpoint that is complete, below `<volume>/.keepstep/records/`.

A record appears only after its checkpoint has its final name, and it lists every file with its size, so that a
checkpoint cut short by a crash or a deletion can be told from a whole one. Records lie outside the checkpoints because
frameworks order their checkpoint directories by modification time. `keepstep_api.records` has the format.
"""

import json
import logging
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any, Final

from keepstep.checkpoints.durable import sync_directory, write_durably
from keepstep_api import names
from keepstep_api.records import SUFFIX, Kind, Record, RecordedFile

__all__ = [
    "Kind",
    "Record",
    "RecordedFile",
    "damage",
    "decode_record",
    "is_whole",
    "read_record",
    "read_records",
    "remove_record",
    "write_record",
]

_log: Final = logging.getLogger("keepstep")


def write_record(directory: Path, record: Record) -> None:
    """Write a record durably, in place of the one of that name and directory. Raises OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    write_durably(directory / record.file_name, record.encode())


def read_record(path: Path) -> Record | None:
    """Return the record in this file; None if there is none that can be read. Says if there is one that cannot."""
    try:
        return _decode(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        # With the error's type, because a KeyError's text is only the key. Some errors' repr has all the bytes.
        _log.warning("record skipped: path=%s error=%s: %s", path, type(error).__name__, error)
        return None


def read_records(directory: Path) -> Sequence[Record]:
    """Return every readable record, the newest first. An unreadable one is logged and left alone."""
    read = map(read_record, directory.glob(f"*{SUFFIX}"))
    return sorted((record for record in read if record is not None), key=lambda record: record.order, reverse=True)


def remove_record(path: Path) -> None:
    """Remove a record durably, if it is there. Raises OSError."""
    with suppress(FileNotFoundError):
        path.unlink()
        sync_directory(path.parent)


def damage(record: Record, checkpoint: Path) -> str | None:
    """Return in words how the checkpoint differs from its record; None if it does not.

    Compares the sizes alone. The agent, which only uploads by a record, compares the times too. Here a file that is
    newer for a harmless reason, such as a copied volume or a framework that touched it, would cost the resume.
    """
    for file in record.files:
        try:
            size_bytes = (checkpoint / file.path).stat().st_size
        except OSError as error:
            return f"{file.path}: {error.strerror}"
        if size_bytes != file.size_bytes:
            return f"{file.path} has {size_bytes} bytes instead of {file.size_bytes}"
    return None


def is_whole(record: Record, checkpoint: Path) -> bool:
    """Whether the checkpoint is as its record says; if not, say that it is skipped."""
    reason = damage(record, checkpoint)
    if reason is not None:
        _log.warning("checkpoint skipped: name=%s reason=%s", record.name, reason)
    return reason is None


def _decode(path: Path) -> Record:
    value = json.loads(path.read_bytes())
    record = decode_record(value)
    # The name becomes a path that rotation may delete.
    if record.file_name != path.name:
        raise ValueError(f"it names {record.name!r} in {record.directory or 'the checkpoint directory'}")
    return record


def decode_record(value: Any) -> Record:
    """Return the record that `Record.encode` wrote as this JSON value. Raises KeyError, TypeError or ValueError."""
    if value["format"] != names.RECORD_FORMAT:
        raise ValueError(f"it has format {value['format']}, this version of Keepstep reads {names.RECORD_FORMAT}")
    files = tuple(RecordedFile(path=str(file["path"]), size_bytes=int(file["size"])) for file in value["files"])
    # Rotation deletes what these name.
    if any(PurePosixPath(file.path).is_absolute() or ".." in PurePosixPath(file.path).parts for file in files):
        raise ValueError("it names a file outside its checkpoint")
    return Record(
        name=str(value["name"]),
        step=int(value["step"]),
        save=str(value["save"]),
        kind=Kind(value["kind"]),
        world_size=int(value["world_size"]),
        saved_at=float(value["saved_at"]),
        files=files,
        committed=bool(value.get("committed", False)),
        announced=bool(value.get("announced", False)),
        directory=str(value.get("directory", "")),
        output=str(value.get("output", "")),
        by_framework=bool(value.get("by_framework", False)),
        ranks=tuple(int(rank) for rank in value.get("ranks", ())),
        others=tuple(str(path) for path in value.get("others", ())),
        inode=int(value.get("inode", 0)),
    )

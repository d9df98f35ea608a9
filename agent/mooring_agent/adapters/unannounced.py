"""Checkpoints whose client met no agent to announce them to, by its records (`mooring.records` has the format)."""

import json
import os
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

import structlog

from mooring_agent.adapters.volume.content_signature import content_signature
from mooring_agent.adapters.volume.shared_volume import Folder, open_volume
from mooring_agent.adapters.volume.source_walk import resolve_source
from mooring_agent.core.errors import MooringError
from mooring_agent.core.model import Kind
from mooring_api.names import RECORDS_DIRECTORY, STATE_DIRECTORY

_FOLDER: Final = f"{STATE_DIRECTORY}/{RECORDS_DIRECTORY}"
_SUFFIX: Final = ".json"
_LIMIT_BYTES: Final = 64 * 1024 * 1024
_UNREADABLE: Final = (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError)

log = structlog.get_logger("mooring.rescue")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedCheckpoint:
    """What a record says. `handed_over`: the checkpoint came from the destination, or an agent had it.

    `recorded_ns`: when it was written, by the clock that stamps the checkpoint's files too. `ranks`: whose parts are
    here; empty where nobody says. `signature`: of the content that was compared with the record.
    """

    path: Path
    sizes_bytes: tuple[tuple[str, int], ...]
    step: int
    save: str
    kind: Kind
    world_size: int
    saved_at: float
    recorded_ns: int
    handed_over: bool
    ranks: tuple[int, ...]
    signature: str = ""


def unannounced(volume: Path, checkpoint_directory: Path, *, known: Collection[str]) -> Sequence[RecordedCheckpoint]:
    """What was saved after the last checkpoint that an agent had, the oldest first; `known` are save ids.

    A record is written when its checkpoint is complete and on disk, so it needs no other proof than the sizes. What is
    older was superseded. Blocks.
    """
    found: list[RecordedCheckpoint] = []
    try:
        with open_volume(volume) as root:
            with root.folder(_FOLDER) as folder:
                names = [entry.name for entry in folder.entries() if entry.name.endswith(_SUFFIX)]
                for name in names:
                    # A record that cannot be read says nothing; restore and the client each report it.
                    with suppress(*_UNREADABLE):
                        found.append(_read(folder, name, volume, checkpoint_directory))
            found.sort(key=lambda one: (one.saved_at, one.step))
            handed_over = (position for position, one in enumerate(found) if one.handed_over or one.save in known)
            last = max(handed_over, default=-1)
            return [one for one in map(partial(_signed, volume), found[last + 1 :]) if _is_whole(root, volume, one)]
    except OSError:
        return []


def speaks_for(volume: Path, checkpoint: Path, checkpoint_directory: Path) -> bool:
    """Whether a record is about that very path: a client announces it, or restore has brought it. Blocks."""
    try:
        with open_volume(volume) as root, root.folder(_FOLDER) as folder:
            recorded = _read(folder, f"{checkpoint.name}{_SUFFIX}", volume, checkpoint_directory)
        return os.path.normpath(recorded.path) == os.path.normpath(checkpoint)
    except FileNotFoundError:
        return False
    except _UNREADABLE:
        # Whoever wrote it means to speak for something of that name.
        return True


def _read(folder: Folder, name: str, volume: Path, checkpoint_directory: Path) -> RecordedCheckpoint:
    """Raises what `_UNREADABLE` names."""
    recorded_ns = folder.status(name).st_mtime_ns
    record = json.loads(folder.read(name, _LIMIT_BYTES))
    if not isinstance(record, dict):
        raise TypeError("a record is a JSON object")
    # Where a framework wrote it, relative to the volume.
    directory = record.get("directory")
    return RecordedCheckpoint(
        path=(checkpoint_directory if directory is None else volume / str(directory)) / name.removesuffix(_SUFFIX),
        sizes_bytes=tuple((str(file["path"]), int(file["size"])) for file in record["files"]),
        step=int(record["step"]),
        save=str(record["save"]),
        kind=Kind(record["kind"]),
        world_size=int(record["world_size"]),
        saved_at=float(record["saved_at"]),
        recorded_ns=recorded_ns,
        handed_over=bool(record.get("committed") or record.get("announced")),
        ranks=tuple(int(rank) for rank in record.get("ranks", ())),
    )


def _signed(volume: Path, recorded: RecordedCheckpoint) -> RecordedCheckpoint:
    """Before it is compared: the next checkpoint of that name may take its place at any time."""
    try:
        return replace(recorded, signature=content_signature(volume, str(recorded.path)))
    except MooringError:
        return recorded  # comparing says what is wrong


def _is_whole(root: Folder, volume: Path, recorded: RecordedCheckpoint) -> bool:
    damage = next(
        (reason for file in recorded.sizes_bytes if (reason := _damage(root, volume, recorded, *file))),
        None,
    )
    if damage is not None:
        log.warning(
            "rescue.dropped",
            path=str(recorded.path),
            step=recorded.step,
            reason=damage,
            hint="no agent had it, and it is not what was saved any more: an older one stays the newest committed",
        )
    return damage is None


def _damage(root: Folder, volume: Path, recorded: RecordedCheckpoint, file: str, size_bytes: int) -> str | None:
    """Why a file is not what was recorded: another size, or written since, as a framework may use a path again."""
    try:
        found = resolve_source(volume, f"{recorded.path}/{file}".rstrip("/"))
        status = root.status(found)
    except OSError as error:
        return f"{file}: {error.strerror}"
    except MooringError as error:
        return f"{file}: {error}"
    if status.st_size != size_bytes:
        return f"{file} has {status.st_size} bytes instead of {size_bytes}"
    if status.st_mtime_ns > recorded.recorded_ns:
        return f"{file} was written to after it was recorded"
    return None

"""Names what Keepstep keeps in `.keepstep` and in the state directory, and moves aside what is there of another kind.

A trainer may put a file in the place of a folder, or a folder, a link, a fifo, a socket or a device in the place of a
file. No start may end by that, because the next one would find it too. Nothing is deleted: it may be the user's.
"""

import secrets
import stat
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

import structlog

from keepstep_agent.adapters.volume.shared_volume import PARTIAL_SUFFIX, Folder
from keepstep_agent.core.mirror.base import BASE_FILE
from keepstep_api.names import (
    AGENT_STATE_DIRECTORY,
    AUTOLOAD_PROCESSES,
    INCOMING_DIRECTORY,
    JOURNAL,
    OWNING_DESTINATION,
    RANKS_DIRECTORY,
    RECORDS_DIRECTORY,
    REPLACED_DIRECTORY,
    RESERVE,
    RESUMED,
    SAVING_DIRECTORY,
    SIGNAL_FILE,
    SOCKET,
    STAGED_DIRECTORY,
    STATE_DIRECTORY,
    VOLUME_IDENTITY,
)

WRITE_PROBE: Final = ".writable"
"""A file that is made and removed at each start."""
RUN_LOCK: Final = "run.lock"
START_RECORD: Final = "start.json"
ANNOUNCED_PATHS: Final = "announced.json"
AGENT_NOTE: Final = "under-way"
RESTORE_NOTE: Final = "restore-under-way"
JOURNAL_SUFFIXES: Final = ("", "-wal", "-shm", "-journal")
"""Of the files that SQLite opens by name. It cannot be told not to follow links."""

_ASIDE_INFIX: Final = ".moved-aside-"
_FOLDERS: Final = (
    STAGED_DIRECTORY,
    INCOMING_DIRECTORY,
    REPLACED_DIRECTORY,
    RECORDS_DIRECTORY,
    RANKS_DIRECTORY,
    SAVING_DIRECTORY,
    AGENT_STATE_DIRECTORY,
)
_FILES: Final = (OWNING_DESTINATION, RESERVE, SIGNAL_FILE, AUTOLOAD_PROCESSES, WRITE_PROBE)
_STATE_FILES: Final = (
    VOLUME_IDENTITY,
    RESUMED,
    RUN_LOCK,
    START_RECORD,
    ANNOUNCED_PATHS,
    BASE_FILE,
    AGENT_NOTE,
    RESTORE_NOTE,
)


def _with_partial(names: tuple[str, ...]) -> tuple[str, ...]:
    return (*names, *(name + PARTIAL_SUFFIX for name in names))


ON_THE_VOLUME: Final[Mapping[str, int]] = {STATE_DIRECTORY: stat.S_IFDIR}
IN_OWN_FOLDER: Final[Mapping[str, int]] = {
    **dict.fromkeys(_FOLDERS, stat.S_IFDIR),
    **dict.fromkeys(_with_partial(_FILES), stat.S_IFREG),
    SOCKET: stat.S_IFSOCK,
}
IN_STATE_DIRECTORY: Final[Mapping[str, int]] = dict.fromkeys(
    (*(JOURNAL + suffix for suffix in JOURNAL_SUFFIXES), *_with_partial(_STATE_FILES)), stat.S_IFREG
)
"""The type of each entry by its name, as in `st_mode`."""

_SHOWN: Final = {
    stat.S_IFDIR: "a folder",
    stat.S_IFREG: "a file",
    stat.S_IFLNK: "a link",
    stat.S_IFIFO: "a fifo",
    stat.S_IFSOCK: "a socket",
}

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


def move_aside_wrong_kinds(folder: Folder, kinds: Mapping[str, int]) -> None:
    """Rename each entry of `folder` that is of another kind than `kinds` says, and log it. Blocks; idempotent.

    What cannot be renamed stays, such as a mount: the code that needs the name reports what is wrong.
    """
    for name, expected in kinds.items():
        with suppress(OSError):
            found = stat.S_IFMT(folder.status(name).st_mode)
            if found == expected:
                continue
            aside = rename_aside(folder, name)
            _log.warning(
                "volume.moved_aside",
                path=folder.shown(name),
                kept_as=aside,
                found=_SHOWN.get(found, "a device"),
                expected=_SHOWN[expected],
                hint=f"Keepstep needs {_SHOWN[expected]} of this name: remove what you do not need",
            )


def rename_aside(folder: Folder, name: str) -> str:
    """Give an entry that is in the way another name, and return that. Raises OSError."""
    aside = f"{name}{_ASIDE_INFIX}{secrets.token_hex(4)}"
    folder.rename(name, folder, aside)
    return aside

"""What one look at the output directories shows."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from keepstep_agent.core.errors import RequestError
from keepstep_agent.core.model import Fingerprint
from keepstep_agent.core.stored.object_layout import check_file_path

DATABASE_SUFFIXES: Final = ("-wal", "-shm", "-journal")
"""What SQLite's files beside a database are called."""

_LOG: Final = re.compile(
    r"(?:.*/)?(?:events\.out\.tfevents\.[^/]*|[^/]*\.(?:log|jsonl|wandb|out|err)|[^/]*-shm|lock\.mdb)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputScan:
    """One look at all output directories. Paths begin with the name of the directory.

    `settled`: files with another inode than before that were renamed since they were last written to, or otherwise
    finished: their status is newer than their bytes. `links` are symbolic links with their targets. `problems` says of
    files and folders why they cannot be stored. `missing`: directories that do not exist, yet or any more.
    `unannounced`: what looks like a checkpoint that was announced, and was not; it was not looked into.
    `comes_back_changed`: how restore brings something back that has changed, if not as it is here, with one such path.
    """

    files: Mapping[str, Fingerprint] = field(default_factory=dict)
    settled: frozenset[str] = frozenset()
    links: Mapping[str, str] = field(default_factory=dict)
    problems: Mapping[str, str] = field(default_factory=dict)
    missing: frozenset[str] = frozenset()
    unannounced: frozenset[str] = frozenset()
    comes_back_changed: Mapping[str, str] = field(default_factory=dict)

    def without(self, refused: Mapping[str, str]) -> "OutputScan":
        """Return the look without these files, which cannot be stored for these reasons."""
        if not refused:
            return self
        files = {path: seen for path, seen in self.files.items() if path not in refused}
        return replace(self, files=files, problems={**self.problems, **refused})

    def is_unknown(self, path: str) -> bool:
        """Whether the look could not show what is at a path: it lies in what is missing or could not be read."""
        if path.partition("/")[0] in self.missing:
            return True
        return any(path == problem or path.startswith(f"{problem}/") for problem in self.problems)


def is_log(path: str) -> bool:
    """Whether a file is a log by its name, or memory that processes share: it comes along as it is."""
    return _LOG.fullmatch(path) is not None


def folder_of(path: str) -> str:
    return path.rpartition("/")[0]


def folders_above(path: str) -> Iterator[str]:
    """Yield the folders above a path, the lowest first."""
    while "/" in path:
        path = folder_of(path)
        yield path


def bad_name(path: str) -> str:
    """Return why nothing can be stored under a path, or ""."""
    try:
        check_file_path(path)
    except RequestError as error:
        return str(error)
    return ""

"""What one look at the output directories shows."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from keepstep_agent.core.model import Fingerprint

_LOG: Final = re.compile(r"(?:.*/)?(?:events\.out\.tfevents\.[^/]*|[^/]*\.(?:log|jsonl|wandb|out|err))")


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputScan:
    """One look at all output directories. Paths begin with the name of the directory.

    `links` are symbolic links with their targets. `problems` says of files and folders why they cannot be stored.
    `missing`: a directory does not exist yet.
    """

    files: Mapping[str, Fingerprint] = field(default_factory=dict)
    links: Mapping[str, str] = field(default_factory=dict)
    problems: Mapping[str, str] = field(default_factory=dict)
    missing: bool = False


def is_log(path: str) -> bool:
    """Whether a file is a log by its name. Logs grow all the time: they come along with a snapshot as they are."""
    return _LOG.fullmatch(path) is not None


def folder_of(path: str) -> str:
    return path.rpartition("/")[0]


def pattern_of(path: str) -> str:
    """Return the pattern of a path: paths that differ only in their numbers have the same."""
    return re.sub(r"[0-9]+", "#", path)

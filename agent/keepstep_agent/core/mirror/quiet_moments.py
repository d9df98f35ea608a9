"""Decides when to take a snapshot of the output directories: when something changed and all of it has been quiet.

Owns time: times are seconds of a monotonic clock, and a look is one scan. Invariants:

- Logs neither make a snapshot due nor delay it. Neither do files that turn out to be like logs: written to all the time
  for as long as `patience_seconds`, and either small or growing slowly.
- A program that is never quiet gets a snapshot all the same, after `patience_seconds`. It leaves out each folder in
  which something is being written, as a checkpoint may consist of all files of a folder.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from keepstep_agent.core.mirror.output_scan import OutputScan, folder_of, is_log
from keepstep_agent.core.model import Fingerprint

QUIET_SECONDS: Final = 3.0
PATIENCE_SECONDS: Final = 120.0
_SMALL_BYTES: Final = 1024**2
_SLOW_BYTES_PER_SECOND: Final = 1024**2


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What a look means. `restless`: files were changing just now, so the next look should come soon.

    With `due`: `held_back` are the folders to leave as they were, and `growing` the files that may be written to while
    they are copied.
    """

    due: bool
    restless: bool
    held_back: frozenset[str] = frozenset()
    growing: frozenset[str] = frozenset()


@dataclass(slots=True)
class _Restless:
    """A file that has been changing since `since`, and last at `at`. `first_bytes` is its size then."""

    since: float
    at: float
    first_bytes: int
    last_bytes: int
    only_grew: bool = True


class QuietMoments:
    """Follows the output directories from look to look. `known`: what they looked like in the newest snapshot."""

    def __init__(
        self,
        known: Mapping[str, Fingerprint],
        *,
        quiet_seconds: float = QUIET_SECONDS,
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> None:
        self._quiet_seconds = quiet_seconds
        self._patience_seconds = patience_seconds
        self._files: Mapping[str, Fingerprint] = known
        self._links: Mapping[str, str] | None = None
        self._restless: dict[str, _Restless] = {}
        self._changed_since: float | None = None

    def look(self, scan: OutputScan, at: float) -> Look:
        """Take note of a look, and say what it means."""
        for path in self._changed(scan):
            self._note(path, scan.files.get(path), at)
        self._files, self._links = scan.files, scan.links
        self._restless = {
            path: one for path, one in self._restless.items() if at - one.at < self._quiet_seconds or one.at == at
        }
        steady = frozenset(path for path, one in self._restless.items() if self._is_steady(one, at))
        disturbing = self._restless.keys() - steady
        waited_seconds = 0.0 if self._changed_since is None else at - self._changed_since
        due = self._changed_since is not None and (not disturbing or waited_seconds >= self._patience_seconds)
        return Look(
            due=due,
            restless=bool(self._restless),
            held_back=frozenset(map(folder_of, disturbing)),
            growing=steady,
        )

    def taken(self) -> None:
        """A snapshot of the last look is being stored."""
        self._changed_since = None

    def missed(self, at: float) -> None:
        """The last snapshot came to nothing: what it would have stored is still to be stored."""
        if self._changed_since is None:
            self._changed_since = at

    def _changed(self, scan: OutputScan) -> Iterator[str]:
        for path, seen in scan.files.items():
            if self._files.get(path) != seen and not is_log(path):
                yield path
        for path in self._files:
            if path not in scan.files and not is_log(path):
                yield path
        if self._links is not None and self._links != scan.links:
            yield from {path for path, _ in self._links.items() ^ scan.links.items()}

    def _note(self, path: str, seen: Fingerprint | None, at: float) -> None:
        size_bytes = seen.size_bytes if seen else 0
        one = self._restless.get(path)
        if one is None:
            one = self._restless[path] = _Restless(since=at, at=at, first_bytes=size_bytes, last_bytes=size_bytes)
        before = self._files.get(path)
        is_same_file = before is None or (seen is not None and before.inode == seen.inode)
        one.only_grew = one.only_grew and is_same_file and size_bytes >= one.last_bytes
        one.at, one.last_bytes = at, size_bytes
        if self._changed_since is None and not self._is_steady(one, at):
            self._changed_since = at

    def _is_steady(self, one: _Restless, at: float) -> bool:
        """Whether a file is like a log: it has been written to for long, and is small or grows slowly."""
        seconds = at - one.since
        if seconds < self._patience_seconds:
            return False
        grown_bytes = one.last_bytes - one.first_bytes
        return one.last_bytes < _SMALL_BYTES or (one.only_grew and grown_bytes < _SLOW_BYTES_PER_SECOND * seconds)

"""Knows which files of the output directories somebody announces: a client, an integration, or restore by its record.

Snapshots leave these out. A path that was announced once, or was about to be, stays left out for as long as it exists:
what a client that died has left there may be half a checkpoint.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import structlog

from keepstep_agent.adapters.liveness import RankLocks
from keepstep_agent.adapters.output.mirror_state import read_announced, write_announced
from keepstep_agent.adapters.output.output_directories import OutputDirectories
from keepstep_agent.adapters.records import RecordedPaths
from keepstep_agent.core.mirror.output_scan import folder_of, folders_above
from keepstep_agent.core.mirror.write_groups import kind_of

log = structlog.get_logger("keepstep.mirror")


class AnnouncedPaths:
    """The announced paths of one volume, as paths in a snapshot. `find` blocks; call it from one thread at a time."""

    def __init__(
        self, volume: Path, checkpoint_directory: Path, state_directory: Path, output: OutputDirectories
    ) -> None:
        self._volume = volume
        self._records = RecordedPaths(volume, checkpoint_directory)
        self._state_directory = state_directory
        self._output = output
        self._locks = RankLocks(volume)
        self._known: frozenset[str] | None = None

    def find(self, announced: Iterable[str]) -> frozenset[str]:
        """Return all of them. `announced`: the absolute paths that the agent knows of."""
        if self._known is None:
            self._known = read_announced(self._volume, self._state_directory)
        found = self._records.find() | self._locks.claimed_paths()
        present = frozenset(self._in_snapshots([*map(str, found), *announced]))
        if not present <= self._known:
            self._known = frozenset(path for path in self._known if self._exists(path)) | present
            try:
                write_announced(self._volume, self._state_directory, self._known)
            except OSError as error:
                log.warning("mirror.announced_not_kept", error=str(error))
        return self._known

    def look_alikes(self, announced: Iterable[str], left_out: frozenset[str], stored: Iterable[str]) -> frozenset[str]:
        """Return what lies beside announced paths, is called like one but for its numbers, and was never announced.

        Nobody can tell whether it is whole: its program may have died between two of its announcements. None where
        Keepstep's client runs, which keeps apart what is not complete; and nothing of which `stored` has a file: it was
        there before anything like it was announced. `announced`: as for `find`, which has returned `left_out`.
        """
        paths = list(self._in_snapshots(announced))
        if not paths or self._locks.have_been_held():
            return frozenset()
        kinds: dict[str, set[str]] = {}
        for path in paths:
            kinds.setdefault(folder_of(path), set()).add(kind_of(path))
        found: set[str] = set()
        for above in kinds.keys() - {""}:
            with suppress(OSError), self._output.folder(above) as folder:
                names = [f"{above}/{entry.name}" for entry in folder.entries()]
                found.update(path for path in names if kind_of(path) in kinds[above])
        if found:
            found.difference_update(*((path, *folders_above(path)) for path in (*left_out, *stored)))
        return frozenset(found)

    def _in_snapshots(self, paths: Iterable[str]) -> Iterator[str]:
        for path in paths:
            absolute = Path(os.path.normpath(path))
            for label, directory in self._output.directories.items():
                if absolute.is_relative_to(directory):
                    yield os.path.normpath(f"{label}/{absolute.relative_to(directory)}")

    def _exists(self, path: str) -> bool:
        above, _, name = path.rpartition("/")
        if not above:
            return True
        try:
            with self._output.folder(above) as folder:
                return folder.exists(name)
        except OSError:
            return False

"""Refuses what would not fit into memory beside all that is pinned already."""

from collections.abc import Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Final

from keepstep_agent.adapters.control_group import memory_limit_bytes
from keepstep_agent.core.errors import ErrorKind, RequestError
from keepstep_agent.core.stored.manifest import held_bytes, shortage

_WATCHED_FILE_BYTES: Final = 150
"""For each file of an output directory: what the mirror knows of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestShare:
    """What one rank adds to the manifest of its save, and what else is kept of its files."""

    files: int
    size_bytes: int
    is_snapshot: bool = False

    @property
    def watched_bytes(self) -> int:
        return _WATCHED_FILE_BYTES * self.files if self.is_snapshot else 0


class MemoryRoom:
    """The memory for the files of all pinned checkpoints, by the folder of each rank's pins. Safe to use from threads.

    The ranks of one save are in one manifest, which is in memory when it is committed. Of other saves only the lists of
    files are.
    """

    def __init__(self) -> None:
        self._shares: dict[str, ManifestShare] = {}
        self._lock = Lock()

    def take(self, folder: str, share: ManifestShare, what: str) -> None:
        """Count what is about to be pinned in a folder, which the error calls `what`.

        Raises RequestError if this process could not commit it in the memory that it may have. Never for a few files:
        they make no difference, whatever else is pinned.
        """
        with self._lock:
            shares = {**self._shares, folder: share}
            _check(shares, _save_of(folder), what)
            self._shares = shares

    def check_alone(self, share: ManifestShare, what: str) -> None:
        """As `take`, as if nothing else were pinned, and without counting it."""
        _check({"": share}, "", what)

    def note(self, folder: str, share: ManifestShare) -> None:
        """Count what is pinned in a folder already."""
        with self._lock:
            self._shares[folder] = share

    def give_back(self, folder: str) -> None:
        """Count nothing any more of a rank's folder, or of all the ranks in the folder of a save."""
        with self._lock:
            self._shares = {
                place: share for place, share in self._shares.items() if folder not in (place, _save_of(place))
            }


def _check(shares: Mapping[str, ManifestShare], save: str, what: str) -> None:
    own = [one for place, one in shares.items() if _save_of(place) == save]
    others = [one for place, one in shares.items() if _save_of(place) != save]
    files = sum(one.files for one in own)
    error = shortage(
        what,
        memory_limit_bytes(),
        files=files,
        manifests_bytes=[sum(one.size_bytes for one in own)],
        beside_bytes=sum(held_bytes(files=one.files, manifest_bytes=one.size_bytes) for one in others)
        + sum(one.watched_bytes for one in own),
    )
    if error is None:
        return
    beside = f" beside {sum(one.files for one in others):,} of other saves" if others else ""
    raise RequestError(ErrorKind.BAD_REQUEST, f"{files:,} files are too many here{beside}: {error}", hint=error.hint)


def _save_of(folder: str) -> str:
    return folder.rpartition("/")[0]

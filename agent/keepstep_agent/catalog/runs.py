"""Finds the runs below a prefix by walking its folders level by level, without listing what is in the runs.

A run is a folder with records below `.keepstep/`. It is not descended into: what looks like a run in its saves is none.
Invariants: the walk sends a request or two for each folder that is no run, none for a run that the caller knows, and
ends whatever the bucket holds.
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Final

from keepstep_agent.catalog.object_reads import for_each
from keepstep_agent.core.errors import ErrorKind, StoreError
from keepstep_agent.core.stored.object_layout import PROBE_PREFIX
from keepstep_agent.ports import StoreReader
from keepstep_api.names import STATE_DIRECTORY

_REQUESTS_AT_ONCE: Final = 16
MOST_LEVELS: Final = 8
MOST_FOLDERS: Final = 20_000
"""How deep the walk goes below the destination, and how many folders it looks into."""
_STATE: Final = f"{STATE_DIRECTORY}/"


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundRuns:
    """The runs' folders below the destination, sorted, each with its last slash; `("",)` if the destination is a run.

    `complete` is False if there are more folders, or deeper ones, than the walk looks into. The store does not let us
    list what is in `refused`.
    """

    runs: tuple[str, ...]
    complete: bool
    refused: tuple[str, ...] = ()


async def find_runs(store: StoreReader, *, known: Container[str] = frozenset()) -> FoundRuns:
    """Walk the folders of the destination. What is in `known` is taken for a run without a look."""
    runs: list[str] = []
    refused: list[str] = []
    level, left, complete = [""], MOST_FOLDERS, True
    for _ in range(MOST_LEVELS + 1):
        unknown = [folder for folder in level if folder not in known]
        complete = complete and len(unknown) <= left
        insides = await _look_into(store, unknown[:left], refused, most=left)
        left -= len(insides)
        runs += [folder for folder in level if folder in known or (folder in insides and insides[folder] is None)]
        level = [one for folder in sorted(insides) for one in insides[folder] or ()]
        if not level:
            break
    return FoundRuns(runs=tuple(sorted(runs)), complete=complete and not level, refused=tuple(sorted(refused)))


async def _look_into(
    store: StoreReader, folders: Sequence[str], refused: list[str], *, most: int
) -> dict[str, list[str] | None]:
    """Return what is in each folder, as `_folders_of`. Adds those to `refused` that the store does not let us list."""
    insides: dict[str, list[str] | None] = {}

    async def look(folder: str) -> None:
        try:
            insides[folder] = await _folders_of(store, folder, most)
        except StoreError as error:
            # Of the destination itself, that is an error like any other.
            if error.kind is not ErrorKind.ACCESS_DENIED or not folder:
                raise
            insides[folder] = []
            refused.append(folder)

    await for_each(folders, look, at_once=_REQUESTS_AT_ONCE)
    return insides


async def _folders_of(store: StoreReader, folder: str, most: int) -> list[str] | None:
    """Return the folders right below, one more than `most` if there are more; None if `folder` is a run."""
    found: list[str] = []
    async for one in store.list_folders(folder):
        if one == folder + _STATE:
            if await _has_records(store, folder):
                return None
        elif len(found) <= most:
            found.append(one)
    return found


async def _has_records(store: StoreReader, folder: str) -> bool:
    """Whether a run has left something there, and not a probe alone. A folder may be listed whose objects are gone."""
    async for one in store.list(folder + _STATE):
        if not one.key.startswith(folder + PROBE_PREFIX):
            return True
    return False

"""Reads, checks and prunes what a destination holds, through the store ports.

Knows nothing of local disks, of the agent's state or of how the store is reached. Nothing here retries, except that
bytes that arrive wrong are fetched once more. So when people wait for the result, pass a `RetryingStore`.
"""

from mooring_agent.catalog.deep_check import check
from mooring_agent.catalog.fetching import PACKS_AT_ONCE, StoredPack, fetch_pack, fetch_part, packs_at_once, packs_of
from mooring_agent.catalog.pruning import PruneReport, prune
from mooring_agent.catalog.reading import (
    CommittedCheckpoint,
    Problem,
    StoredFile,
    has_marker,
    list_committed,
    load,
    read_marker,
)

__all__ = [
    "PACKS_AT_ONCE",
    "CommittedCheckpoint",
    "Problem",
    "PruneReport",
    "StoredFile",
    "StoredPack",
    "check",
    "fetch_pack",
    "fetch_part",
    "has_marker",
    "list_committed",
    "load",
    "packs_at_once",
    "packs_of",
    "prune",
    "read_marker",
]

"""The commit protocol's verdicts: what a listing says of a save, and whose marker it is that we read back.

Write order: files, then rank manifests, then (once every rank's manifest of this save exists and the listing shows
every file at its size) the marker, then its readback. The marker's body is a pure function of the manifests, so two
committers write the same bytes and a lost answer is settled by reading. docs/design/0001 has the whole argument.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from mooring_agent.core.manifest import encode_manifest
from mooring_agent.core.model import RankManifest, SaveInfo
from mooring_agent.core.object_layout import file_key, manifest_key

WAIT_FOR_OTHER_COMMITTER_SECONDS: Final = 5.0
"""Rank 0's agent writes the marker at once; the others step in after this, should it have died."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListingVerdict:
    """What a listing of the save lacks of ours, and how many ranks have no manifest yet."""

    lost_files: tuple[tuple[int, str], ...]
    lost_manifests: tuple[int, ...]
    missing_ranks: tuple[int, ...]

    @property
    def complete(self) -> bool:
        return not (self.lost_files or self.lost_manifests or self.missing_ranks)


def judge_listing(info: SaveInfo, ours: Sequence[RankManifest], sizes: Mapping[str, int]) -> ListingVerdict:
    """Compare `sizes` (key -> bytes) with what our ranks have stored; anything else of the save only counts ranks."""
    our_ranks = {manifest.rank for manifest in ours}
    return ListingVerdict(
        lost_files=tuple((manifest.rank, path) for manifest in ours for path in missing_files(manifest, sizes)),
        lost_manifests=tuple(
            manifest.rank
            for manifest in ours
            if sizes.get(manifest_key(info, manifest.rank)) != len(encode_manifest(manifest))
        ),
        missing_ranks=tuple(
            rank for rank in range(info.world_size) if rank not in our_ranks and manifest_key(info, rank) not in sizes
        ),
    )


def missing_files(manifest: RankManifest, sizes: Mapping[str, int]) -> list[str]:
    """Files of a manifest that the listing lacks or shows with another size."""
    return [file.path for file in manifest.files if sizes.get(file_key(manifest.info, file.path)) != file.size_bytes]

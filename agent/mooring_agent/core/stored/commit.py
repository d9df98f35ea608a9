"""The commit protocol's verdicts: what a listing lacks of a save, and whether its ranks contradict each other.

Files are written first, then rank manifests, then the marker, which is then read back. The marker is written only when
every rank's manifest exists, the listing shows every file at its size, and no two ranks claim one name for different
bytes. Its body is a pure function of the manifests, so two committers write the same bytes, and reading it resolves a
lost answer. docs/design/0001 has the whole argument.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from mooring_agent.core.model import FileEntry, RankManifest, SaveInfo
from mooring_agent.core.stored.manifest import encode_manifest
from mooring_agent.core.stored.object_layout import file_key, is_manifest_of, manifest_key, manifests_prefix, pack_key

DIFFERENT_FILES_HINT: Final = "ranks must write different file names, or announce the same directory"

WAIT_FOR_OTHER_COMMITTER_SECONDS: Final = 5.0
"""Rank 0's agent writes the marker at once. The others write it after this time, in case that agent has died."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListingVerdict:
    """What the listing of a save lacks of our objects, and how many ranks have no manifest yet (`missing_ranks`)."""

    lost_files: tuple[tuple[int, str], ...]
    lost_packs: tuple[tuple[int, int], ...]
    lost_manifests: tuple[int, ...]
    missing_ranks: int

    @property
    def complete(self) -> bool:
        return not (self.lost_files or self.lost_packs or self.lost_manifests or self.missing_ranks)


def judge_listing(info: SaveInfo, ours: Sequence[RankManifest], sizes: Mapping[str, int]) -> ListingVerdict:
    """Compare `sizes` (key -> bytes) with what our ranks have stored. Other ranks' manifests are only counted."""
    manifests = {key for key in sizes if key.startswith(manifests_prefix(info))}
    there = manifests | {manifest_key(info, manifest.rank) for manifest in ours}
    return ListingVerdict(
        lost_files=tuple((manifest.rank, path) for manifest in ours for path in missing_files(manifest, sizes)),
        lost_packs=tuple((manifest.rank, number) for manifest in ours for number in missing_packs(manifest, sizes)),
        lost_manifests=tuple(
            manifest.rank
            for manifest in ours
            if sizes.get(manifest_key(info, manifest.rank)) != len(encode_manifest(manifest))
        ),
        # Counts the manifests that exist, so that a large claimed world size does not make this slow.
        missing_ranks=info.world_size - sum(is_manifest_of(info, key) for key in there),
    )


def contradiction(manifests: Iterable[RankManifest]) -> str:
    """Return why these ranks' files cannot lie in one folder; empty if they can. The same entry twice is fine."""
    found: dict[str, tuple[int, FileEntry]] = {}
    for manifest in manifests:
        for file in manifest.files:
            rank, entry = found.setdefault(file.path, (manifest.rank, file))
            if not entry.has_bytes_of(file):
                return f"ranks {rank} and {manifest.rank} have different bytes for {file.path}"
    for path, (rank, _) in found.items():
        for folder in accumulate(path.split("/")[:-1], "{}/{}".format):
            if folder in found:
                return f"{folder} is a file of rank {found[folder][0]} and a folder of rank {rank}"
    return ""


def is_listed(manifest: RankManifest, sizes: Mapping[str, int]) -> bool:
    """Whether the listing shows all files and packs of a manifest."""
    return not missing_files(manifest, sizes) and not missing_packs(manifest, sizes)


def missing_files(manifest: RankManifest, sizes: Mapping[str, int]) -> list[str]:
    """Return the own, unpacked files of a manifest that the listing lacks or shows with another size."""
    return [
        file.path
        for file in manifest.files
        if file.is_own and file.place is None and sizes.get(file_key(manifest.info, file.path)) != file.size_bytes
    ]


def missing_packs(manifest: RankManifest, sizes: Mapping[str, int]) -> list[int]:
    """Return the packs of a manifest that the listing lacks or shows with another size."""
    return [
        number
        for number, size_bytes in enumerate(manifest.pack_sizes_bytes)
        if sizes.get(pack_key(manifest.info, manifest.rank, number)) != size_bytes
    ]

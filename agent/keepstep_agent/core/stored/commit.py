"""The commit protocol's verdicts: what a listing lacks of a save, and whether its ranks contradict each other.

Files are written first, then manifests, then the marker, which is then read back. An agent writes one manifest for its
ranks. The marker is written only when manifests of all ranks exist, the listing shows every file at its size, and no
two ranks claim one name for different bytes. Its body is a pure function of the manifests, so two committers write the
same bytes, and reading it resolves a lost answer. docs/design/0001 has the whole argument.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import merge
from itertools import accumulate, groupby, pairwise
from operator import itemgetter
from typing import Final

from keepstep_agent.core.file_lists import paths_of
from keepstep_agent.core.model import RankManifest, SaveInfo
from keepstep_agent.core.stored.object_layout import file_key, manifest_key, pack_key, parse_manifest_key

DIFFERENT_FILES_HINT: Final = "ranks must write different file names, or announce the same directory"


@dataclass(frozen=True, slots=True, kw_only=True)
class LostObjects:
    """Objects that we have stored and the listing lacks: (rank, path) pairs, and (rank, number of the pack) pairs."""

    files: tuple[tuple[int, str], ...]
    packs: tuple[tuple[int, int], ...]

    def __bool__(self) -> bool:
        return bool(self.files or self.packs)


def lost_objects(ours: Sequence[RankManifest], sizes: Mapping[str, int]) -> LostObjects:
    """Compare `sizes` (key -> bytes), a listing of the whole save, with what our ranks have stored."""
    return LostObjects(
        files=tuple((one.rank, path) for one in ours for path in missing_files(one, sizes)),
        packs=tuple((one.rank, number) for one in ours for number in missing_packs(one, sizes)),
    )


def manifest_key_of(ranks: Sequence[RankManifest]) -> str:
    """Return the key of the manifest that has just these ranks."""
    return manifest_key(ranks[0].info, min(one.rank for one in ranks), len(ranks))


def missing_ranks(info: SaveInfo, sizes: Mapping[str, int]) -> int:
    """Return how many ranks have no manifest, by the names of the manifests alone, so it may be too few.

    Counts the manifests that exist, so that a large claimed world size does not make this slow.
    """
    counts: dict[int, int] = {}
    for key in sizes:
        named = parse_manifest_key(info, key)
        if named:
            first_rank, rank_count = named
            # An agent writes a larger manifest when more ranks have announced to it.
            counts[first_rank] = max(counts.get(first_rank, 0), rank_count)
    return max(0, info.world_size - sum(counts.values()))


def largest_disjoint(manifests: Iterable[Sequence[RankManifest]]) -> list[Sequence[RankManifest]]:
    """Return the manifests that a marker names: the largest first, and none with a rank of one taken before."""
    taken: set[int] = set()
    chosen = []
    for ranks in sorted(manifests, key=lambda ranks: (-len(ranks), ranks[0].rank)):
        numbers = {one.rank for one in ranks}
        if not numbers & taken:
            taken |= numbers
            chosen.append(ranks)
    return chosen


def contradiction(ranks: Sequence[RankManifest]) -> str:
    """Return why these ranks' files cannot lie in one folder; empty if they can. The same entry twice is fine."""
    folders = {path.rpartition("/")[0] for one in ranks for path in paths_of(one.files)}
    folders = {above for folder in folders for above in accumulate(folder.split("/"), "{}/{}".format)}
    for path, same_path in groupby(_by_path(ranks), key=itemgetter(0)):
        (_, first, position), *others = same_path
        for _, other, other_position in others:
            if not first.files[position].has_bytes_of(other.files[other_position]):
                return f"ranks {first.rank} and {other.rank} have different bytes for {path}"
        if path in folders:
            below = next(one for below, one, _ in _by_path(ranks) if below.startswith(f"{path}/"))
            return f"{path} is a file of rank {first.rank} and a folder of rank {below.rank}"
    return ""


def _by_path(ranks: Sequence[RankManifest]) -> Iterator[tuple[str, RankManifest, int]]:
    """Yield (path, rank, position among its files) of all files, by path."""

    def of_rank(one: RankManifest) -> Iterator[tuple[str, RankManifest, int]]:
        paths = paths_of(one.files)
        order: Iterable[int] = range(len(paths))
        if any(path > following for path, following in pairwise(paths)):
            # Keepstep writes them in order. Anyone may write another manifest.
            order = sorted(order, key=paths.__getitem__)
        return ((paths[position], one, position) for position in order)

    return merge(*map(of_rank, ranks), key=itemgetter(0))


def is_listed(manifest: RankManifest, sizes: Mapping[str, int]) -> bool:
    """Whether the listing shows all files and packs of a rank."""
    return not missing_files(manifest, sizes) and not missing_packs(manifest, sizes)


def missing_files(manifest: RankManifest, sizes: Mapping[str, int]) -> list[str]:
    """Return the own, unpacked files of a rank that the listing lacks or shows with another size."""
    return [
        file.path
        for file in manifest.files
        if file.is_own and file.place is None and sizes.get(file_key(manifest.info, file.path)) != file.size_bytes
    ]


def missing_packs(manifest: RankManifest, sizes: Mapping[str, int]) -> list[int]:
    """Return the packs of a rank that the listing lacks or shows with another size."""
    return [
        number
        for number, size_bytes in enumerate(manifest.pack_sizes_bytes)
        if sizes.get(pack_key(manifest.info, manifest.rank, number)) != size_bytes
    ]

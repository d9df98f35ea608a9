"""What a listing says of a save."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep_agent.adapters.checksum import crc64nvme
from keepstep_agent.core.model import FileEntry, Kind, PackPlace, RankManifest, SaveInfo
from keepstep_agent.core.stored.commit import (
    contradiction,
    is_listed,
    largest_disjoint,
    lost_objects,
    missing_files,
    missing_ranks,
)
from keepstep_agent.core.stored.manifest import encode_manifest
from keepstep_agent.core.stored.object_layout import file_key, manifest_key, manifests_prefix, pack_key

_INFO = SaveInfo(save="save", name="checkpoint-1", step=1, kind=Kind.PERIODIC, world_size=2)


def _manifest(rank: int) -> RankManifest:
    file = FileEntry(path=f"rank-{rank}.bin", size_bytes=10, part_size_bytes=100, checksums=(7,))
    return RankManifest(info=_INFO, rank=rank, saved_at=1.0, files=(file,))


def _listing(*manifests: RankManifest) -> dict[str, int]:
    """Of agents with one rank each."""
    sizes = {manifest_key(_INFO, manifest.rank, 1): len(encode_manifest([manifest])) for manifest in manifests}
    return sizes | {file_key(_INFO, file.path): file.size_bytes for manifest in manifests for file in manifest.files}


def test_a_listing_with_everything_of_every_rank_lacks_nothing() -> None:
    sizes = _listing(_manifest(0), _manifest(1))
    assert not missing_ranks(_INFO, sizes)
    assert not lost_objects([_manifest(0)], sizes)
    assert is_listed(_manifest(1), sizes)


def test_a_rank_without_manifest_is_missing() -> None:
    assert missing_ranks(_INFO, _listing(_manifest(0))) == 1


def test_a_manifest_that_a_larger_one_replaces_counts_once() -> None:
    info = replace(_INFO, world_size=8)
    keys = [(0, 1), (0, 2), (0, 3), (4, 2)]
    assert missing_ranks(info, {manifest_key(info, *key): 1 for key in keys}) == 3


def test_a_file_of_ours_that_is_not_listed_is_lost() -> None:
    sizes = _listing(_manifest(0), _manifest(1))
    del sizes[file_key(_INFO, "rank-0.bin")]
    assert lost_objects([_manifest(0)], sizes).files == ((0, "rank-0.bin"),)


def test_a_file_of_ours_with_another_size_is_lost() -> None:
    sizes = _listing(_manifest(0), _manifest(1)) | {file_key(_INFO, "rank-0.bin"): 9}
    assert lost_objects([_manifest(0)], sizes).files == ((0, "rank-0.bin"),)


def test_files_of_other_agents_are_not_ours_to_judge() -> None:
    sizes = _listing(_manifest(0), _manifest(1))
    del sizes[file_key(_INFO, "rank-1.bin")]
    assert not lost_objects([_manifest(0)], sizes)
    assert missing_files(_manifest(1), sizes) == ["rank-1.bin"]


def test_a_pack_that_is_missing_or_of_another_size_is_lost_and_its_files_are_asked_for_by_it_alone() -> None:
    place = PackPlace(number=1, offset_bytes=512)
    packed = replace(_manifest(0), files=(replace(_ENTRY, place=place),), pack_sizes_bytes=(1024, 2048))
    sizes = {pack_key(_INFO, 0, 0): 1024, pack_key(_INFO, 0, 1): 2048}
    assert not lost_objects([packed], sizes)
    assert is_listed(packed, sizes)
    for broken in (sizes | {pack_key(_INFO, 0, 1): 2047}, {k: v for k, v in sizes.items() if "00001.tar" not in k}):
        lost = lost_objects([packed], broken)
        assert (lost.packs, lost.files) == (((0, 1),), ())
        assert not is_listed(packed, broken)


def test_a_marker_takes_the_largest_manifests_first_and_no_rank_twice() -> None:
    def of(*ranks: int) -> list[RankManifest]:
        return [_manifest(rank) for rank in ranks]

    chosen = largest_disjoint([of(3), of(0), of(1, 3), of(0, 2), of(4)])
    assert [[one.rank for one in ranks] for ranks in chosen] == [[0, 2], [1, 3], [4]]


def test_a_manifest_of_another_save_is_not_counted() -> None:
    other = replace(_INFO, save="other")
    sizes = _listing(_manifest(0)) | {manifest_key(other, 1, 1): 1}
    assert missing_ranks(_INFO, sizes) == 1


def _files(rank: int, *files: FileEntry) -> RankManifest:
    return replace(_manifest(rank), files=files)


_ENTRY = FileEntry(path="a/state.pt", size_bytes=10, part_size_bytes=100, checksums=(7,))


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (replace(_ENTRY, checksums=(8,)), "ranks 0 and 1 have different bytes for a/state.pt"),
        (replace(_ENTRY, size_bytes=11), "ranks 0 and 1 have different bytes for a/state.pt"),
        (replace(_ENTRY, path="a"), "a is a file of rank 1 and a folder of rank 0"),
        (replace(_ENTRY, path="a/state.pt/b"), "a/state.pt is a file of rank 0 and a folder of rank 1"),
        (_ENTRY, ""),
        (replace(_ENTRY, place=PackPlace(number=0, offset_bytes=512)), ""),
        (replace(_ENTRY, path="b/state.pt"), ""),
    ],
)
def test_ranks_that_cannot_be_put_into_one_folder_are_a_contradiction(other: FileEntry, reason: str) -> None:
    assert contradiction([_files(0, _ENTRY), _files(1, other)]) == reason


def _cut(body: bytes, part_size_bytes: int) -> FileEntry:
    pieces = [body[at : at + part_size_bytes] for at in range(0, len(body), part_size_bytes)]
    return FileEntry(
        path="config.json",
        size_bytes=len(body),
        part_size_bytes=part_size_bytes,
        checksums=tuple(map(crc64nvme, pieces)),
    )


_part_sizes_bytes = st.integers(1, 1200)


@given(body=st.binary(max_size=1000), one=_part_sizes_bytes, other=_part_sizes_bytes)
def test_ranks_may_cut_the_same_bytes_into_different_parts(body: bytes, one: int, other: int) -> None:
    assert contradiction([_files(0, _cut(body, one)), _files(1, _cut(body, other))]) == ""


@given(body=st.binary(min_size=1, max_size=1000), one=_part_sizes_bytes, other=_part_sizes_bytes, data=st.data())
def test_one_different_bit_is_a_contradiction_whatever_the_parts(
    body: bytes, one: int, other: int, data: st.DataObject
) -> None:
    bit = data.draw(st.integers(0, 8 * len(body) - 1))
    flipped = bytearray(body)
    flipped[bit // 8] ^= 1 << bit % 8
    reason = contradiction([_files(0, _cut(body, one)), _files(1, _cut(bytes(flipped), other))])
    assert reason == "ranks 0 and 1 have different bytes for config.json"


def test_different_sizes_are_a_contradiction_even_where_the_checksums_are_equal() -> None:
    one, other = (replace(_ENTRY, size_bytes=size, part_size_bytes=size, checksums=(7,)) for size in (10, 11))
    assert contradiction([_files(0, one), _files(1, other)]) == "ranks 0 and 1 have different bytes for a/state.pt"


def test_what_a_listing_lacks_is_found_without_counting_to_the_world_size() -> None:
    # Counting to it would take hours.
    info = replace(_INFO, world_size=2**62)
    sizes = {manifest_key(info, rank, 1): 1 for rank in (0, 1, 5, 70_000, 123_456)}
    sizes |= {f"{manifests_prefix(info)}{odd}.json": 1 for odd in ("2-1", "00002x", "123456789012-00001", "-0001")}
    assert missing_ranks(info, sizes) == 2**62 - 5

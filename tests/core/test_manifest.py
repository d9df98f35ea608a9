"""Manifests and commit markers as JSON: one value, one encoding, and nothing half understood."""

import json
from dataclasses import replace
from itertools import permutations
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep_agent.core.errors import ErrorKind, RequestError, StoreError
from keepstep_agent.core.limits import FILES_PER_RANK, MANIFEST_BYTES, MANIFESTS_BYTES, MARKER_BYTES, PIN_BYTES
from keepstep_agent.core.model import FileEntry, Kind, ManifestReference, Owner, PackPlace, RankManifest, SaveInfo
from keepstep_agent.core.policies.restore_choice import Pin, decode_pin, encode_pin
from keepstep_agent.core.stored import checked_json
from keepstep_agent.core.stored.manifest import (
    commit_marker,
    decode_manifest,
    decode_marker,
    encode_manifest,
    encode_marker,
    expected_manifest_bytes,
)
from keepstep_agent.core.stored.object_layout import check_file_path
from keepstep_agent.core.stored.packs_and_parts import LARGEST_PACK_BYTES


def _is_file_path(path: str) -> bool:
    try:
        return bool(check_file_path(path))
    except RequestError:
        return False


_checksums = st.integers(0, 2**64 - 1)
_paths = st.text(st.characters(exclude_categories=["C"]), min_size=1, max_size=40).filter(_is_file_path)


@st.composite
def _alone(draw: st.DrawFn) -> FileEntry:
    part_size_bytes = draw(st.integers(1, 1 << 40))
    count = draw(st.integers(0, 5))
    last = draw(st.integers(1, part_size_bytes))
    return FileEntry(
        path=draw(_paths),
        size_bytes=(count - 1) * part_size_bytes + last if count else 0,
        part_size_bytes=part_size_bytes,
        checksums=tuple(draw(_checksums) for _ in range(count)),
    )


def test_a_snapshot_of_as_many_files_as_may_be_fits_into_a_manifest_and_the_estimate() -> None:
    count = 1_000
    paths = [f"part-{number // 1000:03d}/sample-{number:06d}.bin" for number in range(count)]
    entries = [
        FileEntry(
            path=path,
            size_bytes=240,
            part_size_bytes=64 * 1024**2,
            checksums=(2**63,),
            place=PackPlace(number=1, offset_bytes=2**20),
            owner=Owner(name="node-0", save="earlier", rank=0, path=path),
            modified_ns=2**60,
        )
        for path in paths
    ]
    info = SaveInfo(save="save", name="node-0", step=1, kind=Kind.SNAPSHOT, world_size=1)
    body = encode_manifest([RankManifest(info=info, rank=0, saved_at=1.0, files=entries)])
    assert len(body) <= expected_manifest_bytes(paths, is_snapshot=True)
    assert len(body) * FILES_PER_RANK / count <= MANIFEST_BYTES


def _info(world_size: int = 2) -> SaveInfo:
    return SaveInfo(save="save", name="checkpoint-1", step=1, kind=Kind.FINAL, world_size=world_size)


@st.composite
def _packed(draw: st.DrawFn, pack_sizes_bytes: tuple[int, ...]) -> FileEntry:
    number = draw(st.integers(0, len(pack_sizes_bytes) - 1))
    offset_bytes = draw(st.integers(0, pack_sizes_bytes[number]))
    size_bytes = draw(st.integers(0, pack_sizes_bytes[number] - offset_bytes))
    return FileEntry(
        path=draw(_paths),
        size_bytes=size_bytes,
        part_size_bytes=LARGEST_PACK_BYTES,
        checksums=(draw(_checksums),) if size_bytes else (),
        place=PackPlace(number=number, offset_bytes=offset_bytes),
    )


@given(files=st.lists(_alone()), saved_at=st.floats(0, 1e11), ranks=st.sets(st.integers(0, 10_000), min_size=1))
def test_a_manifest_comes_back_as_it_was(files: list[FileEntry], saved_at: float, ranks: set[int]) -> None:
    manifest = [
        RankManifest(info=_info(10_001), rank=rank, saved_at=saved_at, files=tuple(files)) for rank in sorted(ranks)
    ]
    assert decode_manifest(encode_manifest(manifest[::-1]), "key") == tuple(manifest)


@given(data=st.data(), sizes=st.lists(st.integers(0, LARGEST_PACK_BYTES), min_size=1).map(tuple))
def test_a_manifest_with_packs_comes_back_as_it_was(data: st.DataObject, sizes: tuple[int, ...]) -> None:
    files = tuple(data.draw(st.lists(_alone() | _packed(sizes))))
    manifest = RankManifest(info=_info(), rank=1, saved_at=1.0, files=files, pack_sizes_bytes=sizes)
    assert decode_manifest(encode_manifest([manifest]), "key") == (manifest,)


def _with_a_pack() -> RankManifest:
    place = PackPlace(number=0, offset_bytes=512)
    file = FileEntry(path="a", size_bytes=10, part_size_bytes=100, checksums=(7,), place=place)
    return RankManifest(info=_info(), rank=0, saved_at=1.0, files=(file,), pack_sizes_bytes=(2048,))


def _changed(body: bytes, change: dict[str, object]) -> bytes:
    """As somebody writes it who knows how, with members that make no sense. `ranks` changes the only rank."""
    value = json.loads(body)
    del value["crc32"]
    of_rank = change.get("ranks")
    if isinstance(of_rank, dict):
        change = {"ranks": [value["ranks"][0] | of_rank]}
    return checked_json.encode(value | change)


def test_what_a_manifest_says_of_packs_is_left_out_where_there_are_none() -> None:
    packed = json.loads(encode_manifest([_with_a_pack()]))["ranks"][0]
    assert packed["packs"] == [{"size": 2048}]
    assert packed["files"] == [
        {"path": "a", "size": 10, "part_size": 100, "checksums": [f"{7:016x}"], "pack": 0, "offset": 512}
    ]
    alone = json.loads(encode_manifest(_manifests()[:1]))
    assert alone["format"] == 1
    assert set(alone) == {"format", "save", "name", "step", "kind", "world_size", "checksum", "ranks", "crc32"}
    assert set(alone["ranks"][0]) == {"rank", "saved_at", "files"}
    assert set(alone["ranks"][0]["files"][0]) == {"path", "size", "part_size", "checksums"}


@pytest.mark.parametrize(
    "change",
    [
        {"packs": []},
        {"packs": [{"size": 521}]},
        {"packs": [{"size": LARGEST_PACK_BYTES + 1}]},
        {"packs": [{}]},
        {"files": [{"path": "a", "size": 0, "part_size": 8, "checksums": [], "pack": 1, "offset": 0}]},
        {"files": [{"path": "a", "size": 0, "part_size": 8, "checksums": [], "pack": -1, "offset": 0}]},
        {"files": [{"path": "a", "size": 0, "part_size": 8, "checksums": [], "pack": 0, "offset": -1}]},
        {"files": [{"path": "a", "size": 0, "part_size": 8, "checksums": [], "pack": 0}]},
    ],
)
def test_a_manifest_whose_files_do_not_lie_in_its_packs_is_corrupt(change: dict[str, object]) -> None:
    body = _changed(encode_manifest([_with_a_pack()]), {"ranks": change})
    with pytest.raises(StoreError, match="the-key") as refused:
        decode_manifest(body, "the-key")
    assert refused.value.kind is ErrorKind.CHECKPOINT_CORRUPT


def _entry(path: str) -> FileEntry:
    return FileEntry(path=path, size_bytes=0, part_size_bytes=8, checksums=())


def test_a_manifest_says_that_its_file_is_the_checkpoint_and_one_that_says_nothing_means_a_folder() -> None:
    folder = RankManifest(info=_info(), rank=0, saved_at=1.0, files=(_entry("last.ckpt"),))
    file = replace(folder, single_file=True)
    assert b"single_file" not in encode_manifest([folder])
    assert decode_manifest(encode_manifest([folder]), "key") == (folder,)
    assert decode_manifest(encode_manifest([file]), "key") == (file,)


@pytest.mark.parametrize("paths", [(), ("a", "b")])
def test_a_single_file_that_is_none_or_several_is_corrupt(paths: tuple[str, ...]) -> None:
    files = tuple(_entry(path) for path in paths)
    manifest = RankManifest(info=_info(), rank=0, saved_at=1.0, files=files, single_file=True)
    with pytest.raises(StoreError, match="single file"):
        decode_manifest(encode_manifest([manifest]), "the-key")


def _manifests() -> list[RankManifest]:
    return [
        RankManifest(
            info=_info(3),
            rank=rank,
            saved_at=10.0 - rank,
            files=(FileEntry(path=f"r{rank}", size_bytes=5 + rank, part_size_bytes=8, checksums=(rank,)),),
        )
        for rank in range(3)
    ]


def _references() -> list[ManifestReference]:
    return [
        ManifestReference(first_rank=rank, rank_count=1, size_bytes=100 + rank, checksum=2**64 - 1 - rank)
        for rank in range(3)
    ]


def test_two_committers_write_the_same_marker_whatever_order_they_read_in() -> None:
    bodies = {
        encode_marker(commit_marker(order, references))
        for order in permutations(_manifests())
        for references in permutations(_references())
    }
    assert len(bodies) == 1


def test_a_marker_sums_up_its_manifests_and_comes_back_as_it_was() -> None:
    marker = commit_marker(_manifests(), _references())
    assert (marker.size_bytes, marker.file_count, marker.saved_at) == (18, 3, 10.0)
    assert decode_marker(encode_marker(marker), "key") == marker


def test_a_marker_without_a_rank_is_a_bug() -> None:
    with pytest.raises(AssertionError):
        commit_marker(_manifests()[:2], _references())


@pytest.mark.parametrize(
    "change",
    [
        {"checksum": "md5"},
        {"kind": "unheard-of"},
        {"ranks": {"files": [{"path": "a", "size": 9, "part_size": 8, "checksums": ["07"]}]}},
        {"ranks": {"files": [{"path": "a", "size": 9, "part_size": 0, "checksums": ["07"]}]}},
        {"ranks": {"files": [{"path": "a", "size": 9, "part_size": 9, "checksums": ["-7"]}]}},
        {"ranks": {"files": [{"path": "a", "size": 9, "part_size": 9, "checksums": ["10000000000000000"]}]}},
        {"ranks": {"files": [{"path": "a", "size": -9, "part_size": -9, "checksums": ["07"]}]}},
        {"ranks": {"files": [{"path": "a", "size": 1 << 64, "part_size": 1 << 64, "checksums": ["07"]}]}},
        {"ranks": {"files": [{"path": "a", "size": 9}]}},
        {"ranks": {"files": [{"path": "../a", "size": 0, "part_size": 8, "checksums": []}]}},
        {"ranks": {"files": [{"path": "a" * 256, "size": 0, "part_size": 8, "checksums": []}]}},
        {"ranks": {"files": [{"path": "a\x1b[31m", "size": 0, "part_size": 8, "checksums": []}]}},
        {"ranks": {"files": [{"path": "a", "size": 10_001, "part_size": 1, "checksums": ["0" * 16] * 10_001}]}},
        {"ranks": {"files": [{"path": "a", "size": 2**50 + 1, "part_size": 2**50, "checksums": ["0" * 16] * 2}]}},
        {
            "ranks": {
                "files": [
                    {"path": f"{n}", "size": 2**50, "part_size": 2**50, "checksums": ["0" * 16]} for n in range(2)
                ]
            }
        },
        {"ranks": {"saved_at": 1e300}},
        {"ranks": {"saved_at": -1.0}},
        {"step": 10**12},
        {"ranks": {"rank": -1}},
        {"ranks": {"rank": 3}},
        {"ranks": {"added": 1}},
        {"ranks": []},
        {"world_size": 10**9},
        {"name": "../up"},
        {"save": "a/b"},
        {"added": [[]]},
        {"ranks": {"files": None}},
        {"world_size": "many"},
    ],
)
def test_a_manifest_that_is_not_understood_to_the_last_byte_is_corrupt(change: dict[str, object]) -> None:
    body = _changed(encode_manifest(_manifests()[:1]), change)
    with pytest.raises(StoreError, match="the-key") as refused:
        decode_manifest(body, "the-key")
    assert refused.value.kind is ErrorKind.CHECKPOINT_CORRUPT


def test_a_path_that_is_no_text_is_corrupt() -> None:
    body = encode_manifest([RankManifest(info=_info(), rank=0, saved_at=1.0, files=(_entry("weights"),))])
    content = body[: body.rindex(b',"crc32"')].replace(b'"weights"', b'"w\xffights"')
    with pytest.raises(StoreError) as caught:
        decode_manifest(content + b',"crc32":"%08x"}\n' % crc32(content), "key")
    assert caught.value.kind is ErrorKind.CHECKPOINT_CORRUPT


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"\xff", b"null", b"{}"])
def test_a_torn_or_foreign_object_is_corrupt(body: bytes) -> None:
    for decode in (decode_manifest, decode_marker):
        with pytest.raises(StoreError, match="the-key"):
            decode(body, "the-key")


@given(cut=st.integers(0, 200))
def test_a_marker_that_was_cut_off_is_corrupt(cut: int) -> None:
    whole = encode_marker(commit_marker(_manifests(), _references()))
    with pytest.raises(StoreError):
        decode_marker(whole[: min(cut, len(whole) - 2)], "key")


def test_a_marker_that_does_not_name_every_rank_once_is_corrupt() -> None:
    whole = encode_marker(commit_marker(_manifests(), _references()))
    named = json.loads(whole)["manifests"]
    assert decode_marker(_changed(whole, {"manifests": named}), "key").info == _info(3)
    twice = [named[0], named[0], named[2]]
    for ranks in ([*named, named[0]], named[:2], [named[0], named[2], named[1]], twice):
        with pytest.raises(StoreError, match="every rank once"):
            decode_marker(_changed(whole, {"manifests": ranks}), "key")
    with pytest.raises(StoreError):
        decode_marker(_changed(whole, {"manifests": []}), "key")


def test_a_manifest_whose_ranks_are_not_in_order_is_corrupt() -> None:
    whole = encode_manifest(_manifests())
    first, second, third = json.loads(whole)["ranks"]
    for ranks in ([second, first, third], [first, first, second]):
        with pytest.raises(StoreError, match="not in order"):
            decode_manifest(_changed(whole, {"ranks": ranks}), "key")


_FORGED = (
    b'{"saved_at":NaN',
    b'{"saved_at":Infinity',
    b'{"saved_at":1e999',
    b'{"step":' + b"9" * 5000,
    b'{"files":' + b"[" * 100_000 + b"]" * 100_000,
    b'{"deeper":' * 100_000 + b"1" + b"}" * 99_999,
    b'{"name":"\\ud800"',
    b'{"name":"\xff"',
    b'{"name":"\xed\xa0\x80"',
    b'{"files":null',
)


@pytest.mark.parametrize("content", _FORGED, ids=range(len(_FORGED)))
def test_whatever_a_decoder_says_to_it_a_forged_object_is_corrupt(content: bytes) -> None:
    body = content + b',"crc32":"%08x"}\n' % crc32(content)
    for decode in (decode_manifest, decode_marker, decode_pin):
        with pytest.raises(StoreError, match="the-key") as refused:
            decode(body, "the-key")
        assert refused.value.kind is ErrorKind.CHECKPOINT_CORRUPT


def test_an_object_that_is_larger_than_any_may_be_is_not_decoded() -> None:
    for decode, limit in ((decode_manifest, MANIFEST_BYTES), (decode_marker, MARKER_BYTES), (decode_pin, PIN_BYTES)):
        with pytest.raises(StoreError, match="more than"):
            decode(b" " * (limit + 1), "the-key")


def test_one_flipped_bit_anywhere_in_an_object_is_seen() -> None:
    bodies = {
        encode_manifest([_with_a_pack()]): decode_manifest,
        encode_marker(commit_marker(_manifests(), _references())): decode_marker,
        encode_pin(Pin(attempt="job-1")): decode_pin,
    }
    for body, decode in bodies.items():
        assert decode(body, "the-key")
        for bit in range(8 * len(body)):
            flipped = bytearray(body)
            flipped[bit // 8] ^= 1 << bit % 8
            with pytest.raises(StoreError):
                decode(bytes(flipped), "the-key")


def test_all_manifests_of_a_save_together_have_a_limit() -> None:
    count = MANIFESTS_BYTES // MANIFEST_BYTES + 1
    references = [
        ManifestReference(first_rank=rank, rank_count=1, size_bytes=MANIFEST_BYTES, checksum=0) for rank in range(count)
    ]
    ranks = [RankManifest(info=_info(count), rank=rank, saved_at=1.0, files=()) for rank in range(count)]
    with pytest.raises(StoreError, match="manifests of"):
        decode_marker(encode_marker(commit_marker(ranks, references)), "the-key")

"""Pieces are numbers: each byte of each file lies in exactly one, and sets of them behave as Python's."""

from dataclasses import replace
from itertools import chain

from hypothesis import given
from hypothesis import strategies as st

from keepstep_agent.catalog.reading import StoredFile
from keepstep_agent.core.model import FileEntry, PackPlace
from keepstep_agent.restore.pieces import Pieces, PieceSet, joined

PART_BYTES = 10
PIECES = 40
RANGES = st.lists(
    st.tuples(st.integers(0, PIECES), st.integers(0, PIECES)).map(lambda ends: range(min(ends), max(ends)))
)


def stored(path: str, size_bytes: int, pack: int | None) -> StoredFile:
    count = -(-size_bytes // PART_BYTES)
    entry = FileEntry(path=path, size_bytes=size_bytes, part_size_bytes=PART_BYTES, checksums=(0,) * count)
    key, object_bytes = f"save/{path}", size_bytes
    if pack is not None:
        entry = replace(entry, place=PackPlace(number=pack, offset_bytes=0))
        key, object_bytes = f"save/pack-{pack}", 1000 + pack
    return StoredFile(entry=entry, key=key, version="1", object_bytes=object_bytes)


FILES = st.lists(st.tuples(st.integers(0, 35), st.none() | st.integers(0, 2)), max_size=12).map(
    lambda files: [stored(f"{number:02}", size, pack) for number, (size, pack) in enumerate(files)]
)


@given(FILES)
def test_the_pieces_of_all_files_are_all_pieces(files: list[StoredFile]) -> None:
    pieces = Pieces(files)
    of_files = [pieces.of_file(position) for position in range(len(files))]
    assert joined(of_files) == ([range(len(pieces))] if len(pieces) else [])
    assert len(pieces) == len({piece for one in of_files for piece in one})


@given(FILES)
def test_each_part_and_each_pack_is_found_by_its_number(files: list[StoredFile]) -> None:
    pieces = Pieces(files)
    for position, file in enumerate(files):
        of_file = pieces.of_file(position)
        if file.entry.place:
            (piece,) = of_file
            number = pieces.pack_number(piece)
            assert number is not None
            assert pieces.packs[number].key == file.key
            assert pieces.size_bytes([of_file]) == file.object_bytes
        else:
            assert [pieces.part(piece) for piece in of_file] == [(position, part) for part in file.entry.parts()]
            assert [pieces.pack_number(piece) for piece in of_file] == [None] * len(of_file)
            assert pieces.size_bytes([of_file]) == file.entry.size_bytes


@given(st.integers(1, 35), st.integers(0, 40), st.integers(0, 40))
def test_a_range_of_a_file_is_in_the_parts_that_hold_it(size_bytes: int, offset_bytes: int, length_bytes: int) -> None:
    pieces = Pieces([stored("a", 25, None), stored("b", size_bytes, None)])
    end_bytes = min(size_bytes, offset_bytes + length_bytes) if length_bytes else size_bytes
    wanted = range(offset_bytes, end_bytes)
    holding = {
        piece
        for piece in pieces.of_file(1)
        for part in [pieces.part(piece)[1]]
        if any(byte in wanted for byte in range(part.offset_bytes, part.offset_bytes + part.size_bytes))
    }
    assert set(pieces.of_file(1, offset_bytes, length_bytes)) == holding


@given(RANGES, RANGES, RANGES)
def test_a_set_of_pieces_is_a_set(added: list[range], discarded: list[range], asked: list[range]) -> None:
    pieces, expected = PieceSet(PIECES), set[int]()
    for one in added:
        pieces.add(one)
        expected |= set(one)
    for one in discarded:
        pieces.discard(one)
        expected -= set(one)
    assert {piece for piece in range(PIECES) if piece in pieces} == expected
    missing = list(pieces.missing(asked))
    assert all(missing)
    assert numbers(missing) == numbers(asked) - expected


@given(RANGES)
def test_joined_ranges_have_each_piece_once_and_in_order(ranges: list[range]) -> None:
    assert list(chain.from_iterable(joined(ranges))) == sorted(numbers(ranges))


@given(st.integers(0, 30), st.integers(0, 30))
def test_the_bytes_of_pieces_are_the_sum_of_each(begin: int, end: int) -> None:
    pieces = Pieces([stored("a", 35, None), stored("b", 0, None), stored("c", 5, 0), stored("d", 101, None)])
    wanted = range(min(begin, len(pieces)), min(end, len(pieces)))
    assert pieces.size_bytes([wanted]) == sum(pieces.size_bytes([range(piece, piece + 1)]) for piece in wanted)


@given(RANGES)
def test_distinct_pieces_keep_their_order(ranges: list[range]) -> None:
    pieces = Pieces([stored("a", PIECES * PART_BYTES, None)])
    assert list(chain.from_iterable(pieces.distinct(ranges))) == list(dict.fromkeys(chain.from_iterable(ranges)))


def numbers(pieces: list[range]) -> set[int]:
    return set(chain.from_iterable(pieces))

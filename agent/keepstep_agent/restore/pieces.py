"""The pieces that a checkpoint is fetched in, as numbers: each is a part of a file, or a pack of small files.

First come the parts, file by file, then the packs, so the parts of a file are a range, and all pieces of a checkpoint
too. A checkpoint may have 100,000 files, and one that somebody forged millions of parts: a set of pieces takes a byte
for each that there is.
"""

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from keepstep_agent.catalog.fetching import packs_of
from keepstep_agent.catalog.reading import StoredFile
from keepstep_agent.core.model import Part

_NO_PACK: Final = -1


class Pieces:
    """All pieces of files, which are numbered by their positions. `packs` are their packs, in the pieces' order."""

    def __init__(self, files: Sequence[StoredFile]) -> None:
        self.packs = packs_of(files)
        numbers = {pack.key: number for number, pack in enumerate(self.packs)}
        self._pack_numbers = array("i")
        self._sizes_bytes, self._part_sizes_bytes = array("Q"), array("Q")
        # Where the parts of each file begin, and at last where all parts end.
        self._begins = array("Q", [0])
        for file in files:
            entry = file.entry
            self._pack_numbers.append(numbers[file.key] if entry.place else _NO_PACK)
            self._sizes_bytes.append(entry.size_bytes)
            self._part_sizes_bytes.append(entry.part_size_bytes)
            self._begins.append(self._begins[-1] + (0 if entry.place else len(entry.checksums)))

    def __len__(self) -> int:
        return self._begins[-1] + len(self.packs)

    def of_file(self, position: int, offset_bytes: int = 0, length_bytes: int = 0) -> range:
        """Return the pieces that hold a file, or bytes of it. `length_bytes` 0: to its end."""
        number = self._pack_numbers[position]
        if number != _NO_PACK:
            return self.of_pack(number)
        size_bytes, part_size_bytes = self._sizes_bytes[position], self._part_sizes_bytes[position]
        end_bytes = min(offset_bytes + length_bytes, size_bytes) if length_bytes else size_bytes
        if end_bytes <= offset_bytes:
            return range(0)
        begin = self._begins[position]
        return range(begin + offset_bytes // part_size_bytes, begin - (-end_bytes // part_size_bytes))

    def of_pack(self, number: int) -> range:
        piece = self._begins[-1] + number
        return range(piece, piece + 1)

    def pack_number(self, piece: int) -> int | None:
        """Return which pack a piece is; None if it is a part."""
        return piece - self._begins[-1] if piece >= self._begins[-1] else None

    def part(self, piece: int) -> tuple[int, Part]:
        """Return the position of a part's file, and the part."""
        position = bisect_right(self._begins, piece) - 1
        number, part_size_bytes = piece - self._begins[position], self._part_sizes_bytes[position]
        offset_bytes = number * part_size_bytes
        size_bytes = min(part_size_bytes, self._sizes_bytes[position] - offset_bytes)
        return position, Part(number=number + 1, offset_bytes=offset_bytes, size_bytes=size_bytes)

    def size_bytes(self, pieces: Iterable[range]) -> int:
        """Return the bytes that are fetched for these pieces."""
        return sum(map(self._size_bytes, pieces))

    def _size_bytes(self, pieces: range) -> int:
        found_bytes, piece = 0, pieces.start
        while piece < pieces.stop:
            number = self.pack_number(piece)
            if number is not None:
                found_bytes += self.packs[number].size_bytes
                piece += 1
                continue
            # All parts of a file at once: there may be thousands.
            position, first = self.part(piece)
            piece = min(pieces.stop, self._begins[position + 1])
            end_bytes = (piece - self._begins[position]) * self._part_sizes_bytes[position]
            found_bytes += min(end_bytes, self._sizes_bytes[position]) - first.offset_bytes
        return found_bytes

    def distinct(self, pieces: Iterable[range]) -> list[range]:
        """Return the same pieces in the same order, each once."""
        seen, found = PieceSet(len(self)), list[range]()
        for one in pieces:
            found += seen.missing([one])
            seen.add(one)
        return found


class PieceSet:
    """Some of so many pieces. One thread may add to it while another one looks."""

    def __init__(self, count: int) -> None:
        self._has = bytearray(count)

    def __contains__(self, piece: int) -> bool:
        return bool(self._has[piece])

    def add(self, pieces: range) -> None:
        self._has[pieces.start : pieces.stop] = b"\1" * len(pieces)

    def discard(self, pieces: range) -> None:
        self._has[pieces.start : pieces.stop] = bytes(len(pieces))

    def missing(self, pieces: Iterable[range]) -> Iterator[range]:
        """Yield those of the pieces that are not in the set."""
        for one in pieces:
            begin = self._has.find(0, one.start, one.stop)
            while begin >= 0:
                end = self._has.find(1, begin, one.stop)
                end = one.stop if end < 0 else end
                # Unless this piece was added meanwhile.
                if end > begin:
                    yield range(begin, end)
                begin = self._has.find(0, end, one.stop)


def joined(pieces: Iterable[range]) -> list[range]:
    """Return the same pieces in the order of their numbers, each once."""
    found: list[range] = []
    for one in sorted(pieces, key=lambda one: one.start):
        if found and one.start <= found[-1].stop:
            found[-1] = range(found[-1].start, max(found[-1].stop, one.stop))
        elif one:
            found.append(one)
    return found

"""A stream that keeps in our memory what a library writes into a file piece by piece, to be written there later.

`torch.distributed.checkpoint` asks for such a stream for each of its files, and notes where in it a tensor begins.
"""

import ctypes
import io
from collections.abc import Callable, Iterator
from typing import Any, Final

_PIECE_BYTES: Final = 32 * 1024 * 1024


class MemoryStream(io.RawIOBase):
    """Writes into `file`, which is open and empty, where the memory does not suffice.

    Attributes:
        kept: Whether all that was written is in memory, and `file` is still empty.
        size_bytes: How much was written.
    """

    def __init__(self, take: Callable[[int], Any], file: Any) -> None:
        """`take`: returns a `torch.UntypedStorage` of so many bytes; None where there is too little memory."""
        super().__init__()
        self._take = take
        self._file = file
        self._storages: list[Any] = []
        """What the pieces are views of."""
        self._pieces: list[memoryview] = []
        self._free_bytes = 0
        self.kept = True
        self.size_bytes = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.size_bytes

    def fileno(self) -> int:
        """Return the file's descriptor, for those who make it durable."""
        descriptor: int = self._file.fileno()
        return descriptor

    def write(self, data: Any) -> int:
        """Keep any buffer of bytes. Raises OSError where it has to be written at once."""
        source = memoryview(data).cast("B")
        count = self._keep(source) if self.kept else 0
        if count < len(source):
            self._write_what_is_kept()
            self._file.write(source[count:])
        self.size_bytes += len(source)
        return len(source)

    def contents(self) -> Iterator[memoryview]:
        """Yield what is kept, in order, as buffers of bytes."""
        for number, piece in enumerate(self._pieces):
            is_last = number == len(self._pieces) - 1
            yield piece[: len(piece) - self._free_bytes] if is_last else piece

    def _keep(self, source: memoryview) -> int:
        """Return how many bytes found room."""
        kept = 0
        while kept < len(source):
            if not self._free_bytes and not self._add_piece():
                break
            piece = self._pieces[-1]
            start = len(piece) - self._free_bytes
            count = min(self._free_bytes, len(source) - kept)
            piece[start : start + count] = source[kept : kept + count]
            self._free_bytes -= count
            kept += count
        return kept

    def _add_piece(self) -> bool:
        storage = self._take(_PIECE_BYTES)
        if storage is None:
            return False
        self._storages.append(storage)
        self._pieces.append(memoryview((ctypes.c_ubyte * _PIECE_BYTES).from_address(storage.data_ptr())).cast("B"))
        self._free_bytes = _PIECE_BYTES
        return True

    def _write_what_is_kept(self) -> None:
        for piece in self.contents():
            self._file.write(piece)
        self._pieces, self._free_bytes, self.kept = [], 0, False

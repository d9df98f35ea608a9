"""Memory of the host that is kept from save to save, for the copy of a state.

Owns the memory, and the question whether there is enough. A state has the same size at each save, so after the first
one no page is new. The memory is pinned where there is a GPU. It is not in /dev/shm: in a pod that has 64 MiB unless
configured otherwise, and what does not fit there ends the process by SIGBUS.
"""

import logging
import mmap
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

_log: Final = logging.getLogger("keepstep")
_ALIGNMENT_BYTES: Final = 64
_LEFT_FREE_BYTES: Final = 256 * 1024 * 1024
"""What a copy leaves to everything else: a container that reaches its limit is killed."""
_CGROUPS: Final = Path("/sys/fs/cgroup")
_OWN_CGROUP: Final = Path("/proc/self/cgroup")
_MEMORY_OF_MACHINE: Final = Path("/proc/meminfo")


class HostMemory:
    """Blocks of memory, of which one thread takes pieces.

    Attributes:
        ranks: How many ranks of this machine take as much at the same time.
        most_growth_bytes: How much new memory may be made at once; None if only what is free limits it.
        copies: Device, address and size in bytes of what was copied since `reset` -> its copy, a `torch.Tensor`.
    """

    def __init__(self, ranks: int = 1) -> None:
        self.ranks = ranks
        self.most_growth_bytes: int | None = None
        self.copies: dict[tuple[str, int, int], Any] = {}
        self._blocks: list[_Block] = []
        self._block = 0
        self._offset = 0

    @property
    def size_bytes(self) -> int:
        """How much memory there is, in use or not."""
        return sum(map(len, self._blocks))

    def reset(self) -> None:
        """Take back all pieces: nobody reads them any more."""
        self._block = self._offset = 0
        self.copies.clear()

    def reserve(self, size_bytes: int) -> None:
        """Have `size_bytes` in all, and touch the pages, which the first copy would do. Does nothing if too large."""
        import torch

        missing = size_bytes - self.size_bytes
        if missing > 0 and self._grow(missing):
            torch.frombuffer(self._blocks[-1], dtype=torch.uint8).zero_()

    def take(self, sizes: Sequence[int]) -> list[Any] | None:
        """Return a `torch.UntypedStorage` of each of these sizes, in bytes; None where they leave too little memory."""
        places = self._places(sizes)
        if places is None:
            return None
        return [self._piece(block, start, size) for (block, start), size in zip(places, sizes, strict=True)]

    def _places(self, sizes: Sequence[int]) -> list[tuple[int, int]] | None:
        places, block, offset = [], self._block, self._offset
        for index, size in enumerate(sizes):
            while block < len(self._blocks) and offset + size > len(self._blocks[block]):
                block, offset = block + 1, 0
            if block == len(self._blocks) and not self._grow(sum(map(aligned, sizes[index:]))):
                return None
            places.append((block, offset))
            offset += aligned(size)
        self._block, self._offset = block, offset
        return places

    def _piece(self, block: int, start: int, size: int) -> Any:
        import torch

        if size == 0:
            return torch.UntypedStorage(0)  # type: ignore[no-untyped-call]
        piece = memoryview(self._blocks[block])[start : start + size]
        return torch.frombuffer(piece, dtype=torch.uint8).untyped_storage()

    def _grow(self, size_bytes: int) -> bool:
        free_bytes = free_memory_bytes()
        if free_bytes is not None and size_bytes * self.ranks > free_bytes - _LEFT_FREE_BYTES:
            return False
        if self.most_growth_bytes is not None and size_bytes > self.most_growth_bytes:
            return False
        # Private where that can be said: shared memory counts differently, and children would see it.
        private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if sys.platform != "win32" else {}
        block = _Block(-1, max(size_bytes, _ALIGNMENT_BYTES), **private)
        block.pin()
        self._blocks.append(block)
        return True


class _Block(mmap.mmap):
    """Memory that is mapped, and pinned, until nothing refers to it."""

    _pinned_address = 0
    _pinned_for: tuple[int, int] = (0, 0)
    """This process and its device: a forked child has no part in it."""

    def pin(self) -> None:
        import torch

        if not _pins_memory():
            return
        address = torch.frombuffer(self, dtype=torch.uint8).data_ptr()
        failure = torch.cuda.cudart().cudaHostRegister(address, len(self), 0)  # type: ignore[no-untyped-call]
        if int(failure):
            _log.debug("memory not pinned: bytes=%d error=%s", len(self), failure)
        else:
            self._pinned_address = address
            self._pinned_for = os.getpid(), torch.cuda.current_device()

    def __del__(self) -> None:
        process, device = self._pinned_for
        # An ending process gives up all of its memory.
        if self._pinned_address and process == os.getpid() and not sys.is_finalizing():
            import torch

            with torch.cuda.device(device):
                torch.cuda.cudart().cudaHostUnregister(self._pinned_address)  # type: ignore[no-untyped-call]


def aligned(size_bytes: int) -> int:
    """Return how much memory a piece of that size takes."""
    return -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _pins_memory() -> bool:
    """Whether this process uses a GPU, which can then copy into our memory by itself."""
    import torch

    return bool(torch.cuda.is_available() and torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def free_memory_bytes() -> int | None:
    """Return how much more memory this process may use: of the machine, and of its cgroups. None where nobody says."""
    free = [*_free_in_cgroups()]
    try:
        lines = dict(line.split(":", 1) for line in _MEMORY_OF_MACHINE.read_text().splitlines())
        free.append(int(lines["MemAvailable"].split()[0]) * 1024)
    except (OSError, ValueError, KeyError):
        pass
    return min(free, default=None)


def _free_in_cgroups() -> Iterator[int]:
    """Yield what is free below the limit of each cgroup, version 2, that holds this process."""
    try:
        own = next(line[3:] for line in _OWN_CGROUP.read_text().splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):
        return
    folder = _CGROUPS / own.lstrip("/")
    while folder.is_relative_to(_CGROUPS):
        try:
            limit = int((folder / "memory.max").read_text())
            statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            # The kernel drops unused pages of files before it ends a process.
            yield limit - int((folder / "memory.current").read_text()) + int(statistics["inactive_file"])
        except (OSError, ValueError, KeyError):
            # The root of all cgroups has no limit, and most have none.
            pass
        folder = folder.parent

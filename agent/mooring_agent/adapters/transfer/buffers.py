"""Memory that bytes pass through on their way: page-aligned, so that O_DIRECT takes it, and used again.

Owns nothing but what lies idle. A buffer that a thread or a transport may still touch is never given back: whoever is
cancelled lets go of it instead, and the memory goes when the last one that holds it does.
"""

import mmap
from typing import Final

_MOST_IDLE: Final = 16


class BufferPool:
    """Buffers of one size, made when none is idle. For one event loop; not thread-safe."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._idle: list[memoryview] = []

    def take(self) -> memoryview:
        """A writable buffer of `size_bytes`, with whatever it held before."""
        return self._idle.pop() if self._idle else memoryview(mmap.mmap(-1, self.size_bytes))

    def give_back(self, buffer: memoryview) -> None:
        """Only what `take` returned, whole, and only once nobody else touches it."""
        assert len(buffer) == self.size_bytes
        if len(self._idle) < _MOST_IDLE:
            self._idle.append(buffer)

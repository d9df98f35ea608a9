"""The liveness lock of a rank, as other processes see it: `<volume>/.keepstep/ranks/<local rank>`, on 64-bit Linux.

A training process holds a POSIX record lock on that file, which the kernel drops when the process dies.
"""

import os
import struct
from typing import Final

# struct flock of 64-bit Linux: type, whence, start, length, pid; the last field pads it to the kernel's size.
_FLOCK: Final = struct.Struct("hhqqi0q")


def holder(descriptor: int) -> "int | None":
    """Return the process id of the lock's holder; None if nobody else holds it. Raises OSError.

    0 is a process of another pid namespace, -1 a lock that belongs to no single process. It only asks, so it disturbs
    nobody. A lock that this process itself holds is not seen.
    """
    import fcntl  # Windows has none

    whole_file = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    answer = _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_GETLK, whole_file))
    return None if answer[0] == fcntl.F_UNLCK else int(answer[4])

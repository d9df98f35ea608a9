"""A real agent that may read only what its user may, also as root, so that a file of another mode is unreadable.

`python -m tests.harness.agent_without_rights agent …`
"""

import ctypes
import struct
from typing import Final

from keepstep_agent.__main__ import main

_VERSION_3: Final = 0x20080522
_DAC_OVERRIDE, _DAC_READ_SEARCH = 1, 2


def _give_up_rights() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    header = ctypes.create_string_buffer(struct.pack("<Ii", _VERSION_3, 0))
    data = ctypes.create_string_buffer(struct.calcsize("<6I"))
    assert not libc.capget(header, data)
    effective, permitted, inheritable, *others = struct.unpack("<6I", data.raw[:24])
    kept = ~(1 << _DAC_OVERRIDE | 1 << _DAC_READ_SEARCH)
    data = ctypes.create_string_buffer(struct.pack("<6I", effective & kept, permitted & kept, inheritable, *others))
    assert not libc.capset(header, data)


if __name__ == "__main__":
    _give_up_rights()
    main()

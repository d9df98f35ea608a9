"""A folder whose listing never ends, and whose files give EIO when they are read: a filesystem of its own.

`python -m tests.harness.endless_folder <folder>` serves it until it is unmounted, by the kernel's FUSE protocol.
"""

import ctypes
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from errno import EIO, ENOSYS
from pathlib import Path
from typing import Final

import pytest
from tests.harness.agent_process import wait_until
from tests.harness.bounds import HANG_SECONDS

_HEADER: Final = struct.Struct("<IIQQ")
_ANSWER: Final = struct.Struct("<IiQ")
_REQUEST_HEADER_BYTES: Final = 40
_ROOT: Final = 1


@contextmanager
def endless_folder(folder: Path) -> Iterator[Path]:
    """Mount one; skips the test where nobody may."""
    if os.geteuid() != 0 or not Path("/dev/fuse").exists():
        pytest.skip("only root may mount a filesystem of its own, and only with FUSE")
    folder.mkdir()
    server = subprocess.Popen([sys.executable, "-m", "tests.harness.endless_folder", str(folder)])
    try:
        wait_until(lambda: folder.is_mount() or server.poll() is not None, HANG_SECONDS, "it is mounted")
        if server.poll() is not None:
            pytest.skip("this machine lets not even root mount a filesystem of its own")
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=False, timeout=HANG_SECONDS)
        server.kill()
        server.wait(HANG_SECONDS)


def _attributes(node: int) -> bytes:
    mode = 0o40755 if node == _ROOT else 0o100644
    return struct.pack("<QQQQQQIIIIIIIIII", node, 100, 8, 1, 1, 1, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)


def _entries(body: bytes) -> bytes:
    _, number, size_bytes = struct.unpack_from("<QQI", body)
    entries = b""
    while True:
        name = b"file-%d" % number
        entry = struct.pack("<QQII", number + 2, number + 1, len(name), 8) + name
        entry += bytes(-len(entry) % 8)
        if len(entries) + len(entry) > size_bytes:
            return entries
        entries += entry
        number += 1


def _answer(operation: int, node: int, body: bytes) -> tuple[int, bytes]:
    match operation:
        case 26:  # INIT
            return 0, struct.pack("<IIIIHHII", 7, 31, 1 << 16, 0, 16, 12, 1 << 16, 1).ljust(64, b"\0")
        case 3:  # GETATTR
            return 0, struct.pack("<QII", 3600, 0, 0) + _attributes(node)
        case 1:  # LOOKUP
            number = int(body.rstrip(b"\0").rpartition(b"-")[2]) + 2
            return 0, struct.pack("<QQQQII", number, 0, 3600, 3600, 0, 0) + _attributes(number)
        case 27 | 14:  # OPENDIR, OPEN
            return 0, struct.pack("<QII", 1, 0, 0)
        case 28:  # READDIR
            return 0, _entries(body)
        case 29 | 18 | 25:  # RELEASEDIR, RELEASE, FLUSH
            return 0, b""
        case 17:  # STATFS
            return 0, struct.pack("<QQQQQIII", 10, 10, 10, 10, 10, 4096, 255, 4096).ljust(80, b"\0")
        case 15:  # READ
            return EIO, b""
        case _:
            return ENOSYS, b""


def _serve(folder: str) -> int:
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other"
    if ctypes.CDLL(None).mount(b"endless", folder.encode(), b"fuse", 0, options.encode()):
        return 1
    while True:
        try:
            request = os.read(device, 1 << 17)
        except OSError:
            return 0  # unmounted
        _, operation, number, node = _HEADER.unpack_from(request)
        if operation == 2:  # FORGET has no answer
            continue
        error, body = _answer(operation, node, request[_REQUEST_HEADER_BYTES:])
        os.write(device, _ANSWER.pack(_ANSWER.size + len(body), -error, number) + body)


if __name__ == "__main__":
    sys.exit(_serve(sys.argv[1]))

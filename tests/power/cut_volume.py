"""An ext4 filesystem whose power can be cut: on a loop device, ended by its shutdown ioctl, mounted again.

What was not made durable before the cut is gone then, as on a machine that loses its power; the journal is replayed.
"""

import fcntl
import itertools
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.harness.bounds import HANG_SECONDS

_SHUTDOWN = 2 << 30 | 4 << 16 | ord("X") << 8 | 125
"""EXT4_IOC_SHUTDOWN: _IOR('X', 125, __u32)."""
_NO_LOG_FLUSH = 2
_SIZE_BYTES = 256 << 20


class CutVolume:
    """`root` is where it is mounted. Whoever has files of it open must be dead before `restore_power`."""

    def __init__(self, directory: Path) -> None:
        self.root = directory / "volume"
        self._images = (directory / f"disk-{number}.img" for number in itertools.count())
        self._image = next(self._images)

    def make(self) -> None:
        """Skips where that is not possible, and says what is missing."""
        if os.geteuid() != 0:
            pytest.skip("only root may mount a filesystem to cut off")
        if not shutil.which("mkfs.ext4"):
            pytest.skip("mkfs.ext4 is not installed: apt install e2fsprogs")
        self.root.mkdir()
        with self._image.open("wb") as file:
            file.truncate(_SIZE_BYTES)
        _run("mkfs.ext4", "-q", "-F", str(self._image))
        try:
            self._mount()
        except RuntimeError as error:
            pytest.skip(f"this machine lets not even root mount a loop device: {error}")

    def cut(self) -> None:
        """From now on every access fails, and nothing reaches the disk, not even the log."""
        descriptor = os.open(self.root, os.O_RDONLY)
        try:
            fcntl.ioctl(descriptor, _SHUTDOWN, struct.pack("I", _NO_LOG_FLUSH))
        finally:
            os.close(descriptor)

    def restore_power(self) -> None:
        """Mount a copy: where another mount namespace holds the old one, its image would stay shut down."""
        _run("umount", str(self.root))
        cut, self._image = self._image, next(self._images)
        _run("cp", "--sparse=always", str(cut), str(self._image))
        cut.unlink()
        self._mount()

    def _mount(self) -> None:
        _run("mount", "-o", "loop", str(self._image), str(self.root))


@contextmanager
def cut_volume(directory: Path) -> Iterator[CutVolume]:
    volume = CutVolume(directory)
    volume.make()
    try:
        yield volume
    finally:
        # Lazily: a failed test may leave a process that has files of it open.
        _run("umount", "--lazy", str(volume.root))


def _run(*command: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)
    if result.returncode:
        raise RuntimeError(f"{' '.join(command)}: {result.stderr.strip()}")
